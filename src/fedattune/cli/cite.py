"""`fedattune cite`: the BibTeX of what runs used."""

from argparse import Namespace

from ..citations import ALGORITHMS, Used, bibtex, used_by
from ..errors import ConfigError
from ..registry import lookup
from .choices import spelled_out


def cite(space: Namespace) -> str:
    """The BibTeX for the folders and methods given.

    Raises:
        ConfigError: nothing or an unknown method was given.
        RunError: a folder holds no run.
    """
    given = [name.strip() for name in getattr(space, "algorithms", "").split(",") if name.strip()]
    names = spelled_out(given, ALGORITHMS)
    if not space.runs and not names:
        raise ConfigError("cite needs the folders of runs, or --algorithms; see fedattune cite --help")
    for name in names:
        lookup("algorithm", name, ALGORITHMS)
    used, version = used_by(space.runs)
    return bibtex(dict.fromkeys([*used, *(Used("method", name) for name in names)]), version)
