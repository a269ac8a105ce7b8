"""Let a schema hold its options in groups, while users read and write them flat.

Each option is declared once, as a field of its group. The alias of the field is its flat name, which stands in Python
keywords, YAML files, command lines and stored runs: `dp_client_clip=2` becomes `settings.privacy.client.clip`.
"""

from collections.abc import Collection, Mapping
from copy import copy
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import (
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from .options import StrictSchema

Owners = Mapping[str, tuple[str, tuple[str, ...]]]
"""Field -> the field that it belongs to, and values of that one; see `Group`."""


class Group(StrictSchema):
    """Options that belong together. A field `group: Some | None = None` is None until an option turns the group on.

    Attributes:
        switches: flat names of the options that turn the group on.
        needs: what the other options of the group need, as the end of "it needs ...".
        owners: field -> the field before it that it belongs to, and values of that one under which it acts.
    """

    model_config = ConfigDict(extra="forbid")
    switches: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[str] = ""
    owners: ClassVar[Owners] = {}

    @field_validator("*")
    @classmethod
    def _acts(cls, value: Any, info: ValidationInfo) -> Any:
        field, fields = info.field_name or "", cls.model_fields
        owner, values = cls.owners.get(field, ("", ()))
        if owner in info.data and info.data[owner] not in values and value != fields[field].default:
            name = fields[owner].alias or owner
            raise ValueError(f"it needs {name} {' or '.join(values)}, and the {name} is {info.data[owner]}")
        return value

    @classmethod
    def is_on(cls, flat: Mapping[str, Any]) -> bool:
        """Tell whether the flat values turn the group on."""
        return any(flat.get(name) is not None for name in cls.switches)


class _Place(NamedTuple):
    """Place of an option: the groups around it from the outside in, its field, and whether it can be absent."""

    groups: tuple[str, ...]
    field: str
    optional_group: type[Group] | None
    info: FieldInfo


class FlatSchema(StrictSchema):
    """A schema that takes flat options and holds them in groups."""

    @classmethod
    def flat_fields(cls) -> dict[str, FieldInfo]:
        """Return the options by their flat names, in order."""
        return {name: place.info for name, place in _find_options(cls).items()}

    @property
    def given(self) -> set[str]:
        """Flat names of the options that were given; the others have their defaults."""
        return {
            name
            for name, place in _find_options(type(self)).items()
            if (holder := self._find_holder(place)) is not None and place.field in holder.model_fields_set
        }

    def get(self, name: str) -> Any:
        """Return an option by its flat name; an option of an absent group has its default."""
        place = _find_options(type(self))[name]
        holder = self._find_holder(place)
        return place.info.default if holder is None else getattr(holder, place.field)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values of some options, which are checked."""
        return type(self)(**{name: self.get(name) for name in self.given} | changes)

    def to_keywords(
        self,
        *,
        mode: Literal["python", "json"] = "python",
        exclude: Collection[str] = (),
        exclude_defaults: bool = False,
    ) -> dict[str, Any]:
        """Return the flat options, with `exclude_defaults` without those that have their defaults."""
        dumped = self.model_dump(mode=mode)
        keywords = {}
        for name, place in _find_options(type(self)).items():
            if name in exclude or (exclude_defaults and self.get(name) == place.info.default):
                continue
            holder: Any = dumped
            for group in place.groups:
                holder = None if holder is None else holder[group]
            keywords[name] = place.info.default if holder is None else holder[place.field]
        return keywords

    def _find_holder(self, place: _Place) -> Any:
        holder: Any = self
        for group in place.groups:
            holder = None if holder is None else getattr(holder, group)
        return holder

    @model_validator(mode="wrap")
    @classmethod
    def _read_flat(cls, flat: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        nested, problems = cls._nest(flat)
        try:
            schema = handler(nested)
        except ValidationError as error:
            problems += [_flatten_error(cls, one) for one in error.errors(include_url=False)]
        if problems:
            raise ValidationError.from_exception_data(cls.__name__, problems)
        return schema

    @classmethod
    def _nest(cls, flat: Mapping[str, Any]) -> tuple[dict[str, Any], list[InitErrorDetails]]:
        options, nested = _find_options(cls), dict[str, Any]()
        problems = [
            InitErrorDetails(type="extra_forbidden", loc=(name,), input=value)
            for name, value in flat.items()
            if name not in options
        ]
        for name, place in options.items():
            group, default = place.optional_group, place.info.default
            if group is None or group.is_on(flat):
                holder = nested
                for field in place.groups:
                    holder = holder.setdefault(field, {})
                if name in flat:
                    holder[name] = flat[name]
            elif (value := flat.get(name, default)) != default:
                reason = PydanticCustomError("needs", "it needs {needs}", {"needs": group.needs})
                problems.append(InitErrorDetails(type=reason, loc=(name,), input=value))
        return nested, problems


@cache
def _find_options(schema: type[StrictSchema]) -> dict[str, _Place]:
    options: dict[str, _Place] = {}
    for name, info in schema.model_fields.items():
        group = _find_group(info)
        if group is None:
            options[info.alias or name] = _Place((), name, None, _with_default(info))
            continue
        optional = group if info.default is None else None
        for flat, inner in _find_options(group).items():
            options[flat] = inner._replace(
                groups=(name, *inner.groups), optional_group=inner.optional_group or optional
            )
    return options


def _find_group(info: FieldInfo) -> type[Group] | None:
    kinds = (info.annotation, *get_args(info.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Group)), None)


def _with_default(info: FieldInfo) -> FieldInfo:
    """Let an option that its group requires be None: so it leaves the group absent."""
    if not info.is_required():
        return info
    info = copy(info)
    info.default = None
    return info


def _flatten_error(schema: type[StrictSchema], error: Any) -> InitErrorDetails:
    loc, fields = error["loc"], schema.model_fields
    while len(loc) > 1 and loc[0] in fields and (group := _find_group(fields[loc[0]])):
        loc, fields = loc[1:], group.model_fields
    return InitErrorDetails(type=error["type"], loc=loc, input=error["input"], ctx=error.get("ctx", {}))
