"""The command `new`: write a commented file that works, and print the command to run next."""

import importlib.util
import keyword
from argparse import Namespace
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from ..core.errors import ConfigError
from ..core.io import write_text

NEXT_COMMANDS = {
    "algorithm": "fedattune compare --algorithms local,fedavg,{name}.py:{name} --partition dirichlet --rounds 20 "
    "--lr 0.05",
    "model": "fedattune compare --model {name}.py:{name} --partition dirichlet --rounds 20 --lr 0.05",
    "data": "python {name}.py",
}
"""Template -> the command that uses the file."""
KINDS = {"algorithm": "a method", "model": "a model", "data": "a federation"}


def write_template(space: Namespace, _: Sequence[str]) -> int:
    """Write NAME.py from a template; no Python name, no name that something else has, and no file that exists."""
    template, name = str(space.template), str(space.name).removesuffix(".py")
    file = Path(f"{name}.py")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"new {template} {name}: expected a name of letters, digits and _, such as my_{template}")
    if file.exists():
        raise ConfigError(f"{file} exists, and no file is overwritten; give another name")
    if importlib.util.find_spec(name) is not None:
        raise ConfigError(
            f"new {template} {name}: a Python module has this name, and {file} would hide it; give another"
        )
    if template == "algorithm":
        from ..algorithms import ALGORITHMS
        from ..algorithms.own import RESERVED_NAMES

        if name in ALGORITHMS or name in RESERVED_NAMES:
            raise ConfigError(f"new algorithm {name}: FedAttune uses this name itself; give another")
    if template == "model":
        from ..models import MODELS

        if name in MODELS:
            raise ConfigError(f"new model {name}: FedAttune has a model of this name; give another")
    text = (resources.files(__package__) / "templates" / f"{template}.py.txt").read_text(encoding="utf-8")
    write_text(file, text.replace("NAME", name))
    print(f"{file} is {KINDS[template]} that works as it is; change it. Try it by:")
    print(NEXT_COMMANDS[template].format(name=name))
    return 0
