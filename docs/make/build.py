"""What MkDocs runs (plugin gen-files): writes the generated pages, and the others with their links moved."""

import sys
from pathlib import Path

import mkdocs_gen_files

sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.make import pages

for path, content in pages.everything().items():
    with mkdocs_gen_files.open(path, "wb") as file:
        file.write(content)
