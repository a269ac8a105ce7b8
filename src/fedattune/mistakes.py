"""Wrong names and option values, found without the data, so that they are said together with all other mistakes."""

from collections.abc import Callable, Mapping
from typing import Any

from .errors import ConfigError, did_you_mean
from .registry import check_options, options


def wrong_choices(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with the data, partition, methods, model and options named in an unchecked experiment."""
    from .algorithms import ALGORITHMS
    from .data import PARTITIONS, is_table, saved_partitions, source_name
    from .data.manifest import manifest_path
    from .models import MODELS

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
            problems += wrong_values(name, table[name], given)
    data, partition = values.get("data"), values.get("partition")
    if isinstance(data, str) and not is_table(data):
        try:
            source_name(data)
        except ConfigError as error:
            problems.append(str(error))
    if isinstance(partition, str) and partition not in PARTITIONS and not manifest_path(partition).is_file():
        problems.append(
            f"unknown partition {partition!r}; {did_you_mean(partition, [*PARTITIONS, *saved_partitions()])}"
        )
    return problems


def wrong_values(name: str, factory: Callable[..., Any], given: Mapping[str, Any]) -> list[str]:
    """What is wrong with the values of those options in `given` (`option` or `name.option`) that `factory` has."""
    known = {option.name for option in options(factory)}
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
