"""Run the command line by `python -m fedattune`."""

import sys

from .cli import main

sys.exit(main())
