"""What names mean: `all` methods, and the thing that a `--set` option belongs to."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..errors import ConfigError, did_you_mean

ALL = "all"
KINDS = ("algorithm", "model", "partition", "data")
Known = Mapping[str, Mapping[str, Collection[str]]]  # kind -> name in use -> its options
Assigned = dict[str, dict[str, dict[str, Any]]]  # kind -> name in use -> option -> value


def spelled_out(names: Iterable[str], known: Collection[str]) -> tuple[str, ...]:
    """The names, each once, with all that are `known` in the place of `all`."""
    return tuple(dict.fromkeys(one for name in names for one in (known if name == ALL else (name,))))


def assign(given: Mapping[str, Any], known: Known) -> Assigned:
    """Share out `option: value` and `name.option: value`, a named one going before a bare one.

    A bare option goes to every algorithm in use that has it; `model.`, `partition.` and `data.` also work
    as names.

    Raises:
        ConfigError: options that nothing in use has, or that could belong to two kinds of thing.
    """
    assigned: Assigned = {kind: {name: {} for name in names} for kind, names in known.items()}
    errors = []
    for key, value in sorted(given.items(), key=lambda item: "." in item[0]):
        name, _, option = key.rpartition(".")
        places = _places(name, option, known)
        errors += _problems(key, name, option, places, known)
        for kind, owner in places:
            assigned[kind][owner][option] = value
    if errors:
        raise ConfigError("; ".join(errors))
    return assigned


def _places(name: str, option: str, known: Known) -> list[tuple[str, str]]:
    """The (kind, name) pairs in use that the option may belong to."""
    return [
        (kind, owner)
        for kind, owners in known.items()
        for owner, options in owners.items()
        if (not name or name == owner or (name == kind and kind != "algorithm")) and option in options
    ]


def _problems(key: str, name: str, option: str, places: list[tuple[str, str]], known: Known) -> list[str]:
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
