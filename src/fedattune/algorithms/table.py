"""Register methods. `list`, `cite`, the tables of methods and the tests read everything from `METHODS`."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple, ParamSpec

from ..core.algorithm import Algorithm

P = ParamSpec("P")


class Family(StrEnum):
    """Families of methods, in the order in which the documentation lists them."""

    LOCAL = "Training alone"
    GLOBAL = "One model for all"
    ADAPTED = "One model for all, adapted by each client"
    PERSONAL_LAYERS = "Personal layers"
    TWO_HEADS = "Two heads"
    PERSONAL_MODEL = "A personal model, tied to the others"
    MIXTURE = "A mixture of the clients' models"
    GENERATED = "Generated models"
    COMBINED = "Any server rule with any client rule"


class Method(NamedTuple):
    """One entry of the table of methods.

    Attributes:
        factory: makes the `Algorithm`; its keywords are the options of the method. The docstring of its module
            holds the BibTeX entry of the paper.
        family: heading under which the documentation lists the method.
        server: what the server sends, in a few words.
        client: what the client does with it, in a few words.
        cites: methods whose papers are cited too.
        tune: the options that `--tune` tries beside the learning rate, each with its values, the default among them.
    """

    factory: Callable[..., Algorithm]
    family: Family
    server: str
    client: str
    cites: tuple[str, ...] = ()
    tune: Mapping[str, tuple[Any, ...]] = {}


METHODS: dict[str, Method] = {}
"""Name of the method -> its entry; `algorithms/__init__.py` fixes the order."""


def method(
    family: Family,
    server: str,
    client: str,
    *,
    cites: tuple[str, ...] = (),
    tune: Mapping[str, tuple[Any, ...]] | None = None,
) -> Callable[[Callable[P, Algorithm]], Callable[P, Algorithm]]:
    """Register the decorated factory under its own name; see `Method` for the arguments."""

    def register(factory: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
        name = factory.__name__
        if name in METHODS:
            raise ValueError(f"method: got {name!r} twice, expected one factory per name")
        METHODS[name] = Method(factory, family, server, client, cites, tune or {})
        return factory

    return register
