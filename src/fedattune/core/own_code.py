"""Load custom functions: `file.py:function`, or `package.module:function`.

Methods, models and partitions share this loader. A file gets a module name of its own, so that two files of one name
stand beside each other. Classes of such a module can be pickled; a process that receives them calls `load_file`
before.

Refused: importlib-based plugin libraries (stevedore, pluggy). They find installed packages by their entry points, and
a researcher's file is not installed.
"""

import hashlib
import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from .errors import ConfigError, FedAttuneError, did_you_mean, list_some, summarize_error

MODULE_PREFIX = "fedattune_own"
"""Start of the module names of files."""

Registered = TypeVar("Registered")

_loaded: dict[Path, tuple[int, ModuleType]] = {}
"""File -> time of its last change in nanoseconds, and its module."""


def is_reference(name: str) -> bool:
    """Tell whether a name refers to custom code."""
    return ":" in name


def get_short_name(name: str) -> str:
    """Return the function's name of a reference; other names stay as they are."""
    return name.rpartition(":")[2] if is_reference(name) else name


def find_file(reference: str) -> Path | None:
    """Return the absolute path of the file that a reference names; None for a module or for another name."""
    place, colon, _ = reference.rpartition(":")
    is_file = colon and (place.endswith(".py") or "/" in place or os.sep in place)
    return Path(os.path.abspath(Path(place).expanduser())) if is_file else None


def make_absolute(name: str) -> str:
    """Make the file of a reference absolute, so that it is found from every folder; other names stay as they are."""
    file = find_file(name)
    return name if file is None else f"{file}:{get_short_name(name)}"


def make_portable(name: str) -> str:
    """Name the file of a reference without its folder, so that it is the same on every machine."""
    file = find_file(name)
    return name if file is None else f"{file.name}:{get_short_name(name)}"


CODE_KEYS = ("algorithms", "algorithm", "model", "partition", "metric", "upload_steps", "robust", "loss")
"""Keys of files and options that may name code."""


def list_references(values: object) -> list[str]:
    """List the references to code in nested values: those under the keys that may name code.

    Examples:
        >>> list_references({"algorithms": "fedavg, own.py:near", "columns": [{"model": "net:make"}], "data": "a:b"})
        ['own.py:near', 'net:make']
    """
    if isinstance(values, list | tuple):
        return [name for one in values for name in list_references(one)]
    if not isinstance(values, Mapping):
        return []
    references = []
    for key, value in values.items():
        names = value if isinstance(value, list | tuple) else [value]
        if key in CODE_KEYS and all(isinstance(name, str) for name in names):
            parts = [part.strip() for name in names for part in name.split(",")]
            references += [part for part in parts if is_reference(part)]
        else:
            references += list_references(value)
    return references


def confirm_references(references: Iterable[str], named: Iterable[str], where: Path | str) -> None:
    """Refuse code that a file or folder names and the user does not: importing it would run it."""
    known = {make_absolute(name) for name in named}
    unknown = list(dict.fromkeys(one for one in map(make_absolute, references) if one not in known))
    if unknown:
        raise ConfigError(
            f"{where} names code of somebody's own, {list_some(unknown, 9)}, which is not run because a file names it; "
            f"if it is yours, or you have read it, say so by {format_allow_code(unknown)}"
        )


def format_allow_code(references: Iterable[str]) -> str:
    """Format the option that lets code run; an empty text if there is no code."""
    names = ",".join(dict.fromkeys(references))
    return f"--allow-code {shlex.quote(names)}" if names else ""


def load_function(reference: str, purpose: str, error: type[FedAttuneError] = ConfigError) -> Callable[..., Any]:
    """Load the function of "file.py:function" or "package.module:function"; modules may be in the current folder."""
    place, _, attribute = reference.rpartition(":")
    if not place or not attribute.isidentifier():
        raise error(f"{reference!r}: expected file.py:function or package.module:function")
    file = find_file(reference)
    try:
        module = _import_module(place) if file is None else load_file(file)
    except FileNotFoundError as missing:
        if file is None or file.is_file():  # the code itself looks for a file
            raise error(f"cannot import {place!r} for {purpose} {reference!r}: {summarize_error(missing)}") from missing
        raise error(f"{reference}: there is no file {file}; give the path of a Python file") from missing
    except (Exception, SystemExit) as failure:
        raise error(f"cannot import {place!r} for {purpose} {reference!r}: {summarize_error(failure)}") from failure
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [
            name
            for name, one in vars(module).items()
            if callable(one) and getattr(one, "__module__", None) == module.__name__ and not name.startswith("_")
        ]
        what = "has no function" if function is None else f"has a {type(function).__name__}, no function, called"
        raise error(f"{place!r} {what} {attribute!r} that makes {purpose}; {did_you_mean(attribute, names)}")
    return function  # type: ignore[no-any-return]


def check_new_name(what: str, function: Callable[..., Any], old: Callable[..., Any] | None) -> None:
    """Check that a function to be registered takes the place of none of FedAttune's own."""

    def is_ours(one: Callable[..., Any]) -> bool:
        return (one.__module__ or "").startswith(package)  # code without a file has the module None

    package = f"{__package__.partition('.')[0]}."
    if old and is_ours(old) and not is_ours(function):
        name = function.__name__
        raise ConfigError(f"{what}: {name!r} is a {what} of FedAttune; give your function another name")


def load_registered(reference: str, what: str, registry: Mapping[str, Registered]) -> Registered:
    """Load the function that a reference names, and return what its decorator registered."""
    function = load_function(reference, f"the {what}")
    name = function.__name__
    if name not in registry:
        raise ConfigError(
            f"{reference}: expected a function with the decorator @register_{what.replace(' ', '_')}(...)"
        )
    return registry[name]


def load_file(file: Path) -> ModuleType:
    """Run a Python file as a module, once until the file changes."""
    changed = file.stat().st_mtime_ns
    if file in _loaded and _loaded[file][0] == changed:
        return _loaded[file][1]
    name = f"{MODULE_PREFIX}_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file; its name should end in .py")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # the file's neighbours, as with `python file.py`
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses look here for the module of a class
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before
        raise
    _loaded[file] = changed, module
    return module


def list_loaded_modules() -> list[ModuleType]:
    """List the modules of the loaded files."""
    return [module for _, module in _loaded.values()]


def _import_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the user's folder, as with `python -m`
    return importlib.import_module(name)
