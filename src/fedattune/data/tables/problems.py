"""All problems of a table with a schema at once, for the people who fix the table."""

from pathlib import Path

from ...core.errors import DataError, did_you_mean
from ..schema import Schema
from .checks import find_missing, read_complete_column
from .columns import read_labels, read_schema_features, to_text
from .file import NO_COLUMN, TableFile, read_table


def find_table_problems(path: Path, schema: Schema, *, client_column: str | None, target: str) -> list[str]:
    """Compare every column of a table with a schema.

    Args:
        path: the table.
        schema: the schema.
        client_column: column with the client of each row; None if the table has one client.
        target: column of the class.

    Returns:
        One sentence for each problem, which says what to do.

    """
    try:
        table = read_table(path, client_column or NO_COLUMN, target)
    except DataError as error:
        return [str(error)]
    problems = []
    named = [*schema.columns, target, *([client_column] if client_column is not None else [])]
    for name in named:
        try:
            if name not in table.names:
                raise DataError(
                    f"{path} has no column {name!r}; {did_you_mean(name, table.names)}; add it, or rename the column "
                    "that holds it"
                )
            if name == client_column:
                read_complete_column(table, name, "client")
            elif name == target:
                problems += _find_target_problems(table, schema, name)
            else:
                _read_column(table, schema, name)
        except DataError as error:
            problems.append(str(error))
    return problems


def _find_target_problems(table: TableFile, schema: Schema, name: str) -> list[str]:
    """Find missing values of the target, and values that are no class of the schema."""
    try:
        values, problems = read_complete_column(table, name, "target"), []
    except DataError as error:
        problems = [str(error)]
        if not schema.classes or table.column(name).null_count == len(table.column(name)):
            return problems
        values = to_text(table.values(name))
        values[find_missing(values) | (values == "")] = schema.classes[0]  # these are reported already
    try:
        read_labels(table.path, name, values, schema.classes)
    except DataError as error:
        problems.append(str(error))
    return problems


def _read_column(table: TableFile, schema: Schema, name: str) -> None:
    """Read one column as the schema says.

    Raises:
        DataError: the column does not fit.

    """
    keep = {name}
    only = schema.model_copy(
        update={
            "numbers": tuple(one for one in schema.numbers if one in keep),
            "flagged": tuple(one for one in schema.flagged if one in keep),
            **{
                field: {key: value for key, value in getattr(schema, field).items() if key in keep}
                for field in ("categories", "dates", "texts", "tokens")
            },
        }
    )
    read_schema_features(table, only)
