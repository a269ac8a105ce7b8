"""Generate pages of the documentation site; MkDocs runs `build`."""
