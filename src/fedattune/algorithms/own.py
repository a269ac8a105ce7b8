"""Build a method by its name, or by a reference to a custom factory; see `core.own_code`."""

from collections.abc import Callable, Mapping
from typing import Any

from ..core.algorithm import Algorithm
from ..core.errors import ConfigError, FedAttuneError, summarize_error
from ..core.options import build, look_up
from ..core.own_code import get_short_name, is_reference, load_function
from . import ALGORITHMS

RESERVED_NAMES = {"all", "baselines", "tuning"}
"""Names with a meaning on the command line or in the folder of an experiment."""


def find_method(name: str) -> Callable[..., Algorithm]:
    """Return the factory of a built-in method, or of a reference such as "own.py:robust"."""
    if not is_reference(name):
        if name.endswith(".py"):
            raise ConfigError(f"{name}: name the function that makes the method, too: {name}:function")
        return look_up("algorithm", name, ALGORITHMS)
    if (own := get_short_name(name)) in ALGORITHMS or own in RESERVED_NAMES:
        raise ConfigError(f"{name}: FedAttune uses the name {own} itself; rename your function")
    return load_function(name, "the method")


def build_method(name: str, options: Mapping[str, Any]) -> Algorithm:
    """Build a built-in method, or the one that a reference names, with checked options."""
    factory, short_name = find_method(name), get_short_name(name)
    if not is_reference(name):
        return build(name, factory, options)
    try:
        algorithm = build(short_name, factory, options)
    except FedAttuneError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{name} failed: {summarize_error(error)}") from error
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f"{name} returned {type(algorithm).__name__}, expected an Algorithm; end the function with "
            "return Algorithm(client, server)"
        )
    return algorithm


def check_distinct_names(names: tuple[str, ...]) -> None:
    """Refuse two methods with one name, which would share a run folder."""
    first_of: dict[str, str] = {}
    for name in names:
        first = first_of.setdefault(get_short_name(name), name)
        if first != name:
            raise ConfigError(f"{first} and {name} have the same name; rename one of the functions")
