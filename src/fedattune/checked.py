"""What every schema of options shares: numbers are no booleans, and a mistake is one phrase."""

from collections.abc import Callable
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

SHOWN = 60  # characters of a wrong value that a message repeats


def _is_number(annotation: Any) -> bool:
    """Whether a number can be given, and no boolean."""
    kinds = get_args(annotation)
    return bool not in kinds and (annotation in (int, float) or any(_is_number(kind) for kind in kinds))


class Checked(BaseModel):
    """Options whose numbers cannot be given as true or false, which Python and Pydantic take for 1 and 0."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and _is_number(cls.model_fields[info.field_name or ""].annotation):
            raise ValueError("input should be a number, not true or false")
        return value


def explain(
    error: ValidationError,
    where: Callable[[str], str] = str,
    unknown: Callable[[str], str] = "unknown option {!r}".format,
) -> list[str]:
    """One phrase per wrong key: `where` it was given, what is wrong, what was got."""
    phrases: dict[str, str] = {}
    for one in error.errors():
        key = str(one["loc"][0])
        reason = one["msg"].removeprefix("Value error, ")
        if isinstance(limit := one.get("ctx", {}).get("le"), float) and limit >= 1e6:
            reason = f"input should be at most {limit:g}"  # Pydantic writes all its digits
        phrases.setdefault(
            key,
            unknown(key)
            if one["type"] == "extra_forbidden"
            else f"{where(key)}: {reason[:1].lower()}{reason[1:]}, got {_shown(one['input'])}",
        )
    return list(phrases.values())


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write whole numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
