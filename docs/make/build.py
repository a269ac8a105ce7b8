"""Write the generated pages, and the written pages with their links rewritten; MkDocs runs this (plugin gen-files)."""

import sys
from pathlib import Path

import mkdocs_gen_files

sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.make import pages

for path, content in pages.make_all().items():
    with mkdocs_gen_files.open(path, "wb") as file:
        file.write(content)
