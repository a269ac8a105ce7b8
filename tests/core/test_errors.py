"""Sentences that messages share."""

from fedattune.core.errors import ConfigError, did_you_mean, list_some, name_kind


def test_the_first_names_are_listed_and_the_others_counted() -> None:
    assert list_some(["a", "b"], 2) == "a, b"
    assert list_some(["a", "b", "c"], 2) == "a, b and 1 more"
    assert list_some([str(i) for i in range(2000)], 1) == "0 and 1,999 more"


def test_the_nearest_name_is_suggested() -> None:
    assert did_you_mean("sigmo", ["lam", "sigma"]) == "did you mean 'sigma'? (known: lam, sigma)"
    assert did_you_mean("x", []) == "known: none"


def test_what_stands_in_the_place_of_something_else_is_named() -> None:
    assert [name_kind(one) for one in (ConfigError, ConfigError(), len, None, {})] == [
        "the class ConfigError",
        "a ConfigError object",
        "a builtin_function_or_method object",
        "a NoneType object",
        "a dict object",
    ]
    assert name_kind(OSError()) == "an OSError object"
