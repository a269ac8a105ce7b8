"""Tables are read as they are: dates, free text, rare categories, ids, gaps, odd files; and new rows likewise."""

import gzip
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import fedattune
from cli_helpers import Done
from fedattune import DataError
from fedattune.data import load_table
from fedattune.data.dataset import Dataset
from fedattune.data.schema import OTHER_CATEGORY, Schema
from fedattune.data.tables.by_schema import find_table_problems
from fedattune.data.tables.file import read_table

N = 240
TOPICS = ("rain and wind over the coast tonight", "the match ended with a late goal", "shares fell after the report")


def rows() -> list[dict[str, str]]:
    """Visits of four clinics: a date, a diagnosis of many kinds, a note in words, a number of the visit, a result."""
    random = np.random.default_rng(0)
    out = []
    for i in range(N):
        topic = int(random.integers(3))
        code = int(random.geometric(0.03))
        ill = (topic == 1) != (random.random() < 0.2)
        out.append(
            {
                "visit_id": str(1000 + 7 * i),
                "clinic": f"c{i % 4}",
                "seen": f"2024-{1 + i % 12:02d}-{1 + i % 28:02d}",
                "code": f"D{min(code, 120):03d}",
                "note": f"{TOPICS[topic]}, {random.choice(['good', 'bad', 'odd'])} day {i % 5}",
                "age": "?" if i % 40 == 3 else f"{random.integers(20, 90)}",
                "ill": "yes" if ill else "no",
            }
        )
    return out


def write(path: Path, lines: list[dict[str, str]], *, quote: str = "") -> Path:
    text = "\n".join(
        [",".join(lines[0]), *(",".join(f"{quote}{v}{quote}" if "," in v else v for v in r.values()) for r in lines)]
    )
    if path.suffix == ".gz":
        with gzip.open(path, "wt") as file:
            file.write(text)
    else:
        path.write_text(text)
    return path


def load(path: Path, **options: object) -> Dataset:
    return load_table(path, client_column="clinic", target="ill", **options)  # type: ignore[arg-type]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write(tmp_path / "visits.csv", rows(), quote='"')


def test_every_kind_of_column_becomes_features(table: Path) -> None:
    data = load(table, max_categories=20)
    schema = data.schema
    assert schema is not None
    assert schema.numbers == ("seen", "age")
    assert schema.dates == {"seen": "%Y-%m-%d"}
    assert schema.flagged == ("age",)
    assert len(schema.categories["code"]) == 20
    assert schema.categories["code"][-1] == OTHER_CATEGORY
    assert schema.texts == {"note": 256}
    assert data.x.shape[1] == schema.input_shape[0] == 2 + 1 + 20 + 4 + 256
    said = " ".join(data.notes)
    for words in (
        "'visit_id' counts or names the rows and is left out",
        "Dates became days, month, weekday and, with times, the hour: 'seen'",
        "'code' has ",
        "are one category 'other'",
        "The words of column 'note' are hashed to 256 inputs",
        "A sign such as ? is a missing value in 'age'",
    ):
        assert words in said, words


def test_a_real_category_other_joins_the_rare_ones(tmp_path: Path) -> None:
    """It may be among the most frequent ones, or among the rare ones."""
    for often in (True, False):
        lines = rows()
        for line in lines[: N // 2 if often else 1]:
            line["code"] = OTHER_CATEGORY
        schema = load(write(tmp_path / "t.csv", lines, quote='"'), max_categories=20).schema
        assert schema is not None
        assert len(schema.categories["code"]) == (19 if often else 20)
        assert schema.categories["code"].count(OTHER_CATEGORY) == 1
        assert schema.grouped is None  # every column with this category


def test_dates_are_days_and_waves(tmp_path: Path) -> None:
    """1 January 1970 was a Thursday: day 0, weekday 3; noon is half a turn of the hours."""
    times = ["1970-01-01 12:00:00", "1970-07-03 00:00:00", "1971-01-04 18:00:00"] * 10
    lines = [{"clinic": f"c{i % 2}", "when": t, "ill": "yn"[i % 2]} for i, t in enumerate(times)]
    data = load(write(tmp_path / "t.csv", lines))
    assert data.schema is not None
    assert data.schema.dates == {"when": "%Y-%m-%d %H:%M:%S"}
    days, month, weekday, hour = data.x[:3, 0], data.x[:3, 1:3], data.x[:3, 3:5], data.x[:3, 5:7]
    assert days.tolist() == [0.5, 183.0, 368.75]
    np.testing.assert_allclose(month, [[0, 1], [0, -1], [0, 1]], atol=1e-12)
    angle = 2 * np.pi * np.array([3, 4, 0]) / 7
    np.testing.assert_allclose(weekday, np.stack([np.sin(angle), np.cos(angle)], 1), atol=1e-12)
    np.testing.assert_allclose(hour, [[0, -1], [0, 1], [-1, 0]], atol=1e-12)


@pytest.mark.parametrize("form", ["%d.%m.%Y", "%m/%d/%Y", "%d %b %Y"])
def test_dates_as_people_write_them(form: str, tmp_path: Path) -> None:
    days = np.datetime64("2024-01-20") + np.arange(40)
    lines = [
        {"clinic": f"c{i % 2}", "when": day.astype("datetime64[s]").item().strftime(form), "ill": "yn"[i % 2]}
        for i, day in enumerate(days)
    ]
    data = load(write(tmp_path / "t.csv", lines))
    assert data.x[:, 0].tolist() == days.astype(np.int64).tolist()


def test_rows_without_client_or_target_are_left_out(tmp_path: Path) -> None:
    lines = rows()
    lines[0]["clinic"] = ""
    lines[5]["ill"] = lines[6]["ill"] = ""
    data = load(write(tmp_path / "t.csv", lines, quote='"'))
    assert len(data.y) == N - 3
    said = " ".join(data.notes)
    assert "1 of 240 rows have no value in column 'clinic' and are left out, the first is data row 1." in said
    assert "2 of 239 rows have no value in column 'ill' and are left out, the first is data row 6." in said


@pytest.mark.parametrize("column", ["clinic", "ill"])
def test_a_cell_of_blanks_is_no_client_and_no_class(column: str, tmp_path: Path) -> None:
    lines = rows()
    for line in lines[3:5]:
        line[column] = "   "
    path = write(tmp_path / "t.csv", lines, quote='"')
    data = load(path)
    assert len(data.y) == N - 2
    assert (len(data.owners), data.classes) == (4, ("no", "yes"))
    said = f"2 of 240 rows have no value in column {column!r} and are left out, the first is data row 4."
    assert said in data.notes
    assert data.schema is not None
    (problem,) = find_table_problems(path, data.schema, client_column="clinic", target="ill")
    assert f"column {column!r} lacks 2 of 240 values, the first in data row 4" in problem


@pytest.mark.parametrize("column", ["clinic", "code", "ill"])
def test_a_long_cell_takes_its_own_memory(column: str, tmp_path: Path) -> None:
    """NumPy gives every text of an array as much as the longest one takes."""
    lines = rows()
    load(write(tmp_path / "t.csv", lines, quote='"'), max_categories=20)  # imports take memory, too
    for line in (lines[3], lines[7]):
        line[column] = "x" * 100_000
    path = write(tmp_path / "t.csv", lines, quote='"')
    tracemalloc.start()
    try:
        load(path, max_categories=20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000  # 240 * 4 * 100,000 bytes would be 96 million


@pytest.mark.parametrize(
    ("column", "cell", "by_schema", "message"),
    [
        ("age", "1e40", False, "column 'age' holds 1e[+]40 in data row 9; values"),
        ("age", "many", False, "column 'age' is text with 'many' in data row 9, but"),
        ("age", "many", True, "column 'age' is text with 'many' in data row 9, but the schema"),
        ("age", "", True, "column 'age' lacks 1 of 238 values, the first in data row 9, but the schema"),
        ("ill", "maybe", True, "target column 'ill' holds 'maybe' in data row 9, which is no class"),
    ],
)
def test_messages_count_rows_as_the_file_does(
    column: str, cell: str, by_schema: bool, message: str, tmp_path: Path
) -> None:
    lines = [line | {"age": str(20 + i % 50)} for i, line in enumerate(rows())]
    lines[0]["clinic"] = lines[1]["ill"] = ""
    lines[8][column] = cell
    path = write(tmp_path / "t.csv", lines, quote='"')
    schema = Schema(classes=("no", "yes"), numbers=("age",), target="ill") if by_schema else None
    with pytest.raises(DataError, match=message):
        load_table(path, schema, client_column="clinic", target="ill")


@pytest.mark.parametrize(
    ("cells", "options", "message"),
    [
        ({8: "inf"}, {}, "holds inf in data row 9; correct"),
        ({8: "1e40"}, {}, "holds 1e[+]40 in data row 9, which is too large"),
        ({8: "1e300"}, {"target_type": "class"}, r"holds 1\d{300} in data row 9, and numbers of such a size"),
        ({8: "many"}, {"target_type": "number"}, "is text with 'many' in data row 9, which is no number"),
    ],
)
def test_messages_on_a_number_count_rows_as_the_file_does(
    cells: dict[int, str], options: dict[str, str], message: str, tmp_path: Path
) -> None:
    lines = [line | {"ill": cells.get(i, f"{i}.5")} for i, line in enumerate(rows())]
    lines[0]["clinic"] = ""
    with pytest.raises(DataError, match=f"target column 'ill' {message}"):
        load(write(tmp_path / "t.csv", lines, quote='"'), **options)


def test_a_message_on_a_label_counts_rows_as_the_file_does(tmp_path: Path) -> None:
    lines = [line | {"well": "yes"} for line in rows()]
    lines[0]["clinic"], lines[8]["well"] = "", "maybe"
    path = write(tmp_path / "t.csv", lines, quote='"')
    schema = Schema(classes=(), labels=("ill", "well"), numbers=("visit_id",), target="ill,well")
    with pytest.raises(DataError, match="target column 'well' holds 'maybe' in data row 9, and the schema"):
        load_table(path, schema, client_column="clinic", target="ill,well")


def test_text_views_of_parquet_are_text(tmp_path: Path) -> None:
    lines = rows()
    columns = {name: pa.array([line[name] for line in lines], pa.string_view()) for name in lines[0]}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    data = load(tmp_path / "t.parquet")
    assert data.schema is not None
    assert data.schema.dates == {"seen": "%Y-%m-%d"}
    plain = {name: column.cast(pa.string()) for name, column in columns.items()}
    parquet.write_table(pa.table(plain), tmp_path / "plain.parquet")
    np.testing.assert_array_equal(load(tmp_path / "plain.parquet").x, data.x)


@pytest.mark.parametrize(
    ("head", "above", "more"),
    [
        ('clinic;"age,\nin years";ill', "", ""),
        ("clinic;age;ill;;", "", ";;"),
        ('clinic; "age, years";ill', "", ""),
        ('clinic;age ("years, full");ill', "", ""),
        ("clinic;age;ill", "sep=;\n", ""),
        ("clinic;age,years;ill", "\ufeffsep=;\r\n", ""),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_tables_as_excel_writes_them(head: str, above: str, more: str, encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    lines = [f"{'ns'[i % 2]};{20 + i},5;{'yn'[i % 3 > 0]}{more}" for i in range(40)]
    path.write_bytes((above + "\n".join([head, *lines])).encode(encoding))
    data = load(path)
    assert data.schema is not None
    assert len(data.schema.numbers) == 1
    assert data.x[:2, 0].tolist() == [20.5, 21.5]
    np.testing.assert_array_equal(load_table(path, data.schema, client_column="clinic", target="ill").x, data.x)


def test_columns_without_a_name_that_hold_values_stay(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "\n".join(["clinic,,,ill", *(f"{'ns'[i % 2]},{i % 9},{i % 7},{'yn'[i % 3 > 0]}" for i in range(40))])
    )
    with pytest.raises(DataError, match="more than one column called ''; rename them"):
        load(path)
    path.write_text(path.read_text().replace("clinic,,,", "clinic,,x,"))
    assert load(path).x.shape == (40, 2)


def test_rows_with_gaps_are_left_out_if_asked_for(table: Path) -> None:
    data = load(table, missing="drop")
    assert len(data.y) == N - 6
    assert "6 of 240 rows lack a feature and are left out (--missing drop)." in data.notes
    assert data.schema is not None
    assert not data.schema.flagged


def test_columns_are_dropped_by_name(table: Path) -> None:
    data = load(table, drop_columns="note, code")
    assert data.schema is not None
    assert data.schema.columns == ("seen", "age")
    with pytest.raises(DataError, match="no column 'nota' of drop_columns; did you mean 'note'"):
        load(table, drop_columns="nota")


def test_packed_tables_and_cells_of_several_lines(tmp_path: Path) -> None:
    lines = rows()
    for line in lines:
        line["note"] += "\nsecond line, with a comma"
    plain = load(write(tmp_path / "plain.csv", lines, quote='"'))
    packed = load(write(tmp_path / "packed.csv.gz", lines, quote='"'))
    assert len(plain.y) == N
    np.testing.assert_array_equal(plain.x, packed.x)
    assert packed.name == "packed"


def test_a_column_that_gives_the_target_away_is_named(tmp_path: Path) -> None:
    lines = rows()
    for i, line in enumerate(lines):
        line["paid"] = str(900 + i % 90) if line["ill"] == "yes" else str(i % 90)
    data = load(write(tmp_path / "t.csv", lines, quote='"'))
    (warning,) = [note for note in data.notes if "nearly perfectly" in note]
    assert warning.startswith("Column 'paid' alone predicts the target nearly perfectly (100%)")
    assert "--drop-columns paid." in warning


def test_new_rows_are_read_in_the_same_way(table: Path, tmp_path: Path) -> None:
    """A model predicts the rows that it was tested on as the run did, and takes new codes for `other`."""
    options = {"max_categories": 20}
    data = fedattune.load_federation(table, client_column="clinic", target="ill", options=options)
    result = fedattune.fit(data, "fedavg", rounds=3, lr=0.1)
    result.export("c1", tmp_path / "m.safetensors")
    lines = rows()
    index = data.part("test")[1]
    some = write(tmp_path / "new.csv", [lines[i] for i in index], quote='"')
    found = fedattune.predict(tmp_path / "m.safetensors", some)
    logits = result.predictions["test"].outputs[result.predictions["test"].rows(1)].astype(float)
    chance = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(found.probabilities, chance, atol=1e-5)
    assert found.metrics["accuracy"] == pytest.approx(result.measure_clients("accuracy")[1])
    lines[0]["code"] = "never seen"
    assert len(fedattune.predict(tmp_path / "m.safetensors", write(some, lines[:3], quote='"')).labels) == 3


def test_scaling_keeps_what_is_constant_within_clients(tmp_path: Path, cli: Callable[..., Done]) -> None:
    """The size of a school decides the result: scaled by each school it is 0, scaled by all it is learned."""
    random = np.random.default_rng(1)
    lines = [
        {
            "clinic": f"s{school}",
            "size": str(100 + 20 * school),
            "age": f"{random.normal():.3f}",
            "ill": "yes" if 100 + 20 * school + 60 * random.normal() > 400 else "no",
        }
        for school in range(30)
        for _ in range(20)
    ]
    path = write(tmp_path / "t.csv", lines)
    data = {
        scaling: fedattune.load_federation(path, client_column="clinic", target="ill", scaling=scaling)
        for scaling in ("auto", "client", "global", "federated")
    }
    assert data["auto"].partition["scaling"] == "federated"
    assert data["auto"].digest == data["federated"].digest != data["client"].digest
    assert not data["client"].x[:, 0].any()
    train = np.concatenate([client.train for client in data["auto"].clients])
    sizes = np.array([float(line["size"]) for line in lines])
    scaled = (sizes - sizes[train].mean()) / sizes[train].std()
    for scaling in ("global", "federated"):
        np.testing.assert_allclose(data[scaling].x[:, 0], scaled, atol=1e-5)
    accuracy = {
        name: fedattune.fit(one, "fedavg", rounds=20, lr=0.5).judged["acc_pooled"] for name, one in data.items()
    }
    assert accuracy["auto"] > accuracy["client"] + 0.15


def test_a_return_inside_a_cell_is_a_blank(tmp_path: Path) -> None:
    """Pandas writes such cells without quotes; the row must not end there."""
    lines = rows()
    lines[7]["note"] = "first\rsecond word here"
    path = tmp_path / "t.csv"
    path.write_bytes(write(path, lines, quote='"').read_bytes().replace(b'"first\nsecond', b'"first\rsecond'))
    text = path.read_bytes().replace(b"first\nsecond", b"first\rsecond")
    path.write_bytes(text)
    assert b"first\rsecond" in path.read_bytes()
    assert len(load(path).y) == N


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "latin.csv"])
def test_a_cell_of_five_megabytes(name: str, tmp_path: Path) -> None:
    """More than pyarrow reads at once, wherever it is; cells may hold lines."""
    lines = rows()
    for row in (3, N - 1):
        lines[row]["note"] = "much, and more\n" * 350_000
    if name == "latin.csv":
        lines[5]["note"] = "größer, as before"
    path = write(tmp_path / name, lines, quote='"')
    if name == "latin.csv":
        path.write_bytes(path.read_text().encode("cp1252"))
    assert read_table(path, "clinic", "ill").column("note").to_pylist() == [line["note"] for line in lines]
    assert len(load(path).y) == N


def test_a_message_does_not_repeat_a_cell_of_megabytes(tmp_path: Path) -> None:
    lines = rows()
    lines[7]["age"] = "x" * 5_000_000
    with pytest.raises(DataError, match=r"column 'age' is text with 'x{59}\.\.\. in data row 8, but \d+ of its"):
        load(write(tmp_path / "t.csv", lines, quote='"'))


def test_a_quotation_mark_that_is_never_closed(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", rows())
    path.write_text(path.read_text() + 'a,"b,' + "1,2,3,4,5,6\n" * 200_000)
    with pytest.raises(DataError, match=r"t\.csv cannot be read as CSV: CSV parse error: Expected 7 columns"):
        load(path)
