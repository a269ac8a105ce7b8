"""Wrong names and option values, found without the data, so that they are said together with all other mistakes.

What names mean: `all` methods, and the thing that a `--set` option belongs to.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ..core.errors import ConfigError, did_you_mean
from ..core.options import check_options, list_options


def find_wrong_choices(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with the data, partition, methods, model and options named in an unchecked experiment."""
    from ..algorithms import ALGORITHMS
    from ..data import PARTITIONS, is_table, list_partitions, resolve_source_name
    from ..data.manifest import resolve_manifest_path
    from ..models import MODELS

    problems = []
    names = values.get("algorithms")
    listed = names.split(",") if isinstance(names, str) else names if isinstance(names, list | tuple) else []
    tables: list[tuple[str, Any, Mapping[str, Callable[..., Any]]]] = [
        ("algorithm", name, ALGORITHMS) for name in listed if str(name).strip() != "all"
    ]
    if ":" not in str(values.get("model", ":")):
        tables.append(("model", values["model"], MODELS))
    given = values.get("set")
    for kind, name, table in ((kind, str(name).strip(), table) for kind, name, table in tables):
        if name not in table:
            problems.append(f"unknown {kind} {name!r}; {did_you_mean(name, table)}")
        elif isinstance(given, Mapping):
            problems += find_wrong_values(name, table[name], given)
    data, partition = values.get("data"), values.get("partition")
    if isinstance(data, str) and not is_table(data):
        try:
            resolve_source_name(data)
        except ConfigError as error:
            problems.append(str(error))
    if (
        isinstance(partition, str)
        and partition not in PARTITIONS
        and not resolve_manifest_path(partition).is_file()
    ):
        problems.append(
            f"unknown partition {partition!r}; {did_you_mean(partition, [*PARTITIONS, *list_partitions()])}"
        )
    return problems


def find_wrong_values(name: str, factory: Callable[..., Any], given: Mapping[str, Any]) -> list[str]:
    """What is wrong with the values of those options in `given` (`option` or `name.option`) that `factory` has."""
    known = {option.name for option in list_options(factory)}
    mine = {
        option: value
        for owner, option, value in ((*key.rpartition(".")[::2], value) for key, value in given.items())
        if owner in ("", name) and option in known
    }
    try:
        check_options(name, factory, mine)
    except ConfigError as error:
        return [str(error)]
    return []


ALL_METHODS = "all"


KINDS = ("algorithm", "model", "partition", "data")


KnownOptions = Mapping[str, Mapping[str, Collection[str]]]  # kind -> name in use -> its options


AssignedOptions = dict[str, dict[str, dict[str, Any]]]  # kind -> name in use -> option -> value


def expand_names(names: Iterable[str], known: Collection[str]) -> tuple[str, ...]:
    """The names, each once, with all that are `known` in the place of `all`."""
    return tuple(dict.fromkeys(one for name in names for one in (known if name == ALL_METHODS else (name,))))


def assign_options(given: Mapping[str, Any], known: KnownOptions) -> AssignedOptions:
    """Share out `option: value` and `name.option: value`, a named one going before a bare one.

    A bare option goes to every algorithm in use that has it; `model.`, `partition.` and `data.` also work
    as names.

    Raises:
        ConfigError: options that nothing in use has, or that could belong to two kinds of thing.
    """
    assigned: AssignedOptions = {kind: {name: {} for name in names} for kind, names in known.items()}
    errors = []
    for key, value in sorted(given.items(), key=lambda item: "." in item[0]):
        name, _, option = key.rpartition(".")
        places = _find_owners(name, option, known)
        errors += _find_problems(key, name, option, places, known)
        for kind, owner in places:
            assigned[kind][owner][option] = value
    if errors:
        raise ConfigError("; ".join(errors))
    return assigned


def _find_owners(name: str, option: str, known: KnownOptions) -> list[tuple[str, str]]:
    """The (kind, name) pairs in use that the option may belong to."""
    return [
        (kind, owner)
        for kind, owners in known.items()
        for owner, options in owners.items()
        if (not name or name == owner or (name == kind and kind != "algorithm")) and option in options
    ]


def _find_problems(
    key: str, name: str, option: str, places: list[tuple[str, str]], known: KnownOptions
) -> list[str]:
    owners = {owner: options for group in known.values() for owner, options in group.items()}
    owners |= {
        kind: [o for one in known[kind].values() for o in one] for kind in known if kind != "algorithm"
    }
    if name and name not in owners:
        in_use = [owner for group in known.values() for owner in group]
        return [f"--set {key}: nothing called {name!r} is used here; {did_you_mean(name, in_use)}"]
    if not places:
        options = owners[name] if name else {o for group in owners.values() for o in group}
        who = name if name else "nothing used here"
        return [
            f"--set {key}: {who} has {'no' if name else 'an'} option {option!r}; "
            f"{did_you_mean(option, options)}"
        ]
    if not name and len({kind for kind, _ in places}) > 1:
        ways = " or ".join(f"{owner}.{option}" for _, owner in places)
        return [f"--set {key}: {option!r} could mean several things; write {ways}"]
    return []
