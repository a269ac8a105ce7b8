"""Makes the pages of the documentation site that nobody writes by hand; MkDocs runs `build`."""
