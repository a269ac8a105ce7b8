"""What people write into tables: units, thousands, encodings, spellings, orders of dates, ids that repeat, sheets."""

import datetime as dt
import decimal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedattune import ConfigError, DataError, load_federation
from fedattune.data import Dataset, Schema, load_table, partition_dataset, save_manifest
from fedattune.data.schema import merge_schemas
from fedattune.data.tables.by_schema import find_table_problems
from fedattune.data.tables.new_rows import read_rows

N = 60
Column = Sequence[object]


def base() -> dict[str, Column]:
    return {"site": ["n", "s"] * (N // 2), "y": ["a", "b", "b"] * (N // 3)}


def write(path: Path, columns: dict[str, Column], *, sign: str = ",", encoding: str = "utf-8") -> Path:
    def cell(value: object) -> str:
        text = str(value)
        return f'"{text}"' if sign in text else text

    rows = zip(*columns.values(), strict=True)
    lines = [sign.join(map(cell, columns)), *(sign.join(map(cell, row)) for row in rows)]
    path.write_bytes("\n".join(lines).encode(encoding))
    return path


def load(path: Path, schema: Schema | None = None, **options: object) -> Dataset:
    return load_table(path, schema, client_column="site", target="y", **options)  # type: ignore[arg-type]


def schema_of(data: Dataset) -> Schema:
    assert data.schema is not None
    return data.schema


def repeat(*cells: object) -> list[object]:
    return [cells[i % len(cells)] for i in range(N)]


@pytest.mark.parametrize(
    ("cells", "numbers", "unit"),
    [
        (("6,811.50", "876.25", "1,000,000"), (6811.5, 876.25, 1e6), ""),
        (("1 234,5", "12,25", "3\u202f000"), (1234.5, 12.25, 3000), ""),
        (("1.234,56", "7,5", "-2.000,0"), (1234.56, 7.5, -2000), ""),
        (("1'234.5", "0.5", "9"), (1234.5, 0.5, 9), ""),
        (("22.1 kg", "45 KG", "7"), (22.1, 45, 7), "kg"),
        (("54%", "7.5 %", "100%"), (54, 7.5, 100), "%"),
        (("$1,200", "-$5.50", "($7)"), (1200, -5.5, -7), "$"),
        (("12 €", "3,50 €", "(1.000,00 €)"), (12, 3.5, -1000), "€"),
        (("(12)", "3.5", "4-"), (-12, 3.5, -4), ""),
        (("12,5", "−3,25", "0,001"), (12.5, -3.25, 0.001), ""),
        (("1 year", "2 years", "10 years"), (1, 2, 10), "years"),
        (("12,34,567", "1,00,000", "2.5"), (1234567, 100000, 2.5), ""),
        (("0.5 mg/dl", "1e2 mg/dl", "3 mg/dl"), (0.5, 100, 3), "mg/dl"),
    ],
)
def test_numbers_with_separators_and_units(
    cells: Sequence[str], numbers: Sequence[float], unit: str, tmp_path: Path
) -> None:
    columns = base() | {"x": repeat(*cells)}
    for path in (write(tmp_path / "t.csv", columns), tmp_path / "t.parquet"):
        if path.suffix == ".parquet":
            parquet.write_table(pa.table(columns), path)
        data = load(path)
        schema = schema_of(data)
        assert data.x[:3, 0].tolist() == list(numbers)
        assert schema.numbers == ("x",)
        assert schema.units == ({"x": unit} if unit else {})
        assert any(note.startswith("Numbers are read as people write them in 'x' (") for note in data.notes)
        again = load(path, Schema.from_json(schema.to_json()))
        np.testing.assert_array_equal(again.x, data.x)
        few = write(tmp_path / "new.csv", {"x": cells[:1]})
        new = read_rows(few, schema, np.array([[0.0], [0.0], [1.0]]))
        assert new.x[0, 0] == np.float32(numbers[0])


@pytest.mark.parametrize(
    "cells",
    [
        ("1st", "2nd", "3rd"), ("12A", "12B", "14A"), ("10-19", "20-29"), ("D012", "D013"), ("4x4", "2x2"),
        ("10+ years", "< 1 year", "3 years"), ("30-06", "12-99"), ("no", "yes"),
    ],
)  # fmt: skip
def test_names_with_digits_stay_names(cells: Sequence[str], tmp_path: Path) -> None:
    schema = schema_of(load(write(tmp_path / "t.csv", base() | {"x": repeat(*cells)})))
    assert schema.categories == {"x": tuple(sorted(cells))}


@pytest.mark.parametrize(("sign", "value", "other"), [(",", 1234, ","), (";", 1.234, ".")])
def test_a_comma_that_may_be_either_is_named(sign: str, value: float, other: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", base() | {"x": repeat("1,234", "5,678", "910")}, sign=sign)
    data = load(path)
    assert data.x[0, 0] == value
    assert any(f"give --set table.decimal={other}" in note for note in data.notes)
    told = load(path, decimal=other)
    assert told.x[0, 0] == (1.234 if value == 1234 else 1234)
    assert not any("--set" in note for note in told.notes)
    # What the cells or other columns of the file show is no guess.
    shown = load(write(path, base() | {"x": repeat("1,234", "5,678"), "z": repeat("0,5", "1,25")}, sign=sign))
    assert shown.x[0].tolist() == [1.234, 0.5]
    assert not any("--set" in note for note in shown.notes)
    assert load(write(path, base() | {"x": repeat("1,234", "5678")}, sign=sign)).x[0, 0] == 1.234


def test_a_decimal_sign_that_does_not_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", base() | {"x": repeat("6,811.50", "5")})
    with pytest.raises(DataError, match=r"holds '6,811\.50'.*is no number with the decimal sign ','"):
        load(path, decimal=",")


def test_thousands_with_points_follow_the_file(tmp_path: Path) -> None:
    """Pyarrow takes 1.234 for a fraction, also where the other columns have decimal commas."""
    columns = base() | {"x": repeat("1.234", "5.678"), "z": repeat("0,5", "1,25"), "f": repeat("0.25", "12.5")}
    data = load(write(tmp_path / "t.csv", columns, sign=";"))
    assert dict(zip(schema_of(data).numbers, data.x[0].tolist(), strict=True)) == {"x": 1234, "z": 0.5, "f": 0.25}
    assert schema_of(data).decimals == {"x": ",", "z": ","}
    again = load(write(tmp_path / "n.csv", base() | {k: columns[k] for k in "xzf"}, sign=";"), schema_of(data))
    np.testing.assert_array_equal(again.x, data.x)


THOUSANDS = ("640", "1.139", "7.730", "5.914", "12.500")


@pytest.mark.parametrize("sign", [";", ","])
@pytest.mark.parametrize("options", [{}, {"decimal": ","}])
def test_a_target_of_thousands_with_points(sign: str, options: dict[str, str], tmp_path: Path) -> None:
    """Pyarrow takes them for fractions; one target and several are read alike, and by the schema, too."""
    y = [f"{1 + i}.{139 + i}" if i % 2 else str(640 + i) for i in range(N)]
    columns = base() | {"z": repeat("0,64", "1,25"), "y": y, "w": repeat("1,5", "2,75", "3,5")}
    path = write(tmp_path / "t.csv", columns, sign=sign)
    one = load(path, **options)
    assert one.y[:4].tolist() == [640, 2140, 642, 4142]
    assert any("'y' (2.140 is 2140)" in note for note in one.notes)
    several = load_table(path, client_column="site", target="y,w", **options)  # type: ignore[arg-type]
    assert several.y[:2].tolist() == [[640, 1.5], [2140, 2.75]]
    np.testing.assert_array_equal(load(path, schema_of(one)).y, one.y)
    again = load_table(path, schema_of(several), client_column="site", target="y,w")
    np.testing.assert_array_equal(again.y, several.y)


def test_a_target_shows_the_decimal_sign_of_features(tmp_path: Path) -> None:
    y = [f"{i},64" for i in range(N)]
    data = load(write(tmp_path / "t.csv", base() | {"x": repeat(*THOUSANDS), "y": y}, sign=";"))
    assert data.y[1] == np.float32(1.64)
    assert data.x[:3, 0].tolist() == [640, 1139, 7730]


@pytest.mark.parametrize(("sign", "answers"), [(";", ("0,87", "0,25")), (",", ("1,2", "1,3", "2,3"))])
def test_a_column_that_shows_a_point_keeps_the_others(sign: str, answers: tuple[str, ...], tmp_path: Path) -> None:
    """0.25 has no thousands, so 1.013 has none either, whatever the target shows; and classes show nothing."""
    columns = base() | {"x": repeat("1.013", "2.547"), "z": repeat("0.25", "0.5"), "y": repeat(*answers)}
    kind = "class" if sign == "," else "auto"
    data = load(write(tmp_path / "t.csv", columns, sign=sign), target_type=kind)
    assert data.x[:2, 0].tolist() == [np.float32(1.013), np.float32(2.547)]


@pytest.mark.parametrize("sign", ["", "?", " ?", "NA"])
def test_thousands_with_points_and_gaps(sign: str, tmp_path: Path) -> None:
    """Neither a gap nor --set table.decimal switches the repair off."""
    columns = base() | {"x": [sign, *repeat(*THOUSANDS)[1:]], "z": repeat("0,64", "1,25")}
    path = write(tmp_path / "t.csv", columns, sign=";")
    data = load(path)
    assert data.x[1:5, 0].tolist() == [1139, 7730, 5914, 12500]
    assert np.isnan(data.x[0, 0])
    np.testing.assert_array_equal(load(path, decimal=",").x, data.x)
    np.testing.assert_array_equal(load(path, schema_of(data)).x, data.x)
    alone = write(tmp_path / "alone.csv", base() | {"x": columns["x"]}, sign=";")
    told = load(alone, decimal=",")
    assert told.x[1, 0] == 1139
    assert not any("--set" in note for note in told.notes)


def test_units_that_differ(tmp_path: Path) -> None:
    few = load(write(tmp_path / "t.csv", base() | {"x": repeat("1 kg", "500 g")}))
    assert schema_of(few).categories == {"x": ("1 kg", "500 g")}
    assert any("'x' has several units, 'kg' (30 cells), 'g' (30 cells)" in note for note in few.notes)
    many = [f"{i + 1} kg" if i % 2 else f"{500 + i} g" for i in range(N)]
    with pytest.raises(DataError, match=r"'x' holds numbers in several units, .*convert them to one unit"):
        load(write(tmp_path / "t.csv", base() | {"x": many}), max_categories=20)
    with pytest.raises(DataError, match="'12 kg' in data row 60, but 59 of its 60 values are numbers"):
        load(write(tmp_path / "t.csv", base() | {"x": [*map(str, range(N - 1)), "12 kg"]}))
    kilograms = schema_of(load(write(tmp_path / "t.csv", base() | {"x": repeat("1 kg", "2 kg")})))
    grams = write(tmp_path / "t.csv", base() | {"x": repeat("1 g", "2 g")})
    with pytest.raises(DataError, match="'1 g' in data row 1, which has the unit 'g', while 'kg' is expected"):
        load(grams, kilograms)
    with pytest.raises(DataError, match="'x' is in 'kg' in one table and in 'g' in another"):
        merge_schemas([kilograms, schema_of(load(grams))])


def test_a_target_as_people_write_it(tmp_path: Path) -> None:
    prices = [f"{1000 + 7 * i:,}.50 €" for i in range(N)]
    data = load(write(tmp_path / "t.csv", base() | {"x": list(range(N)), "y": prices}))
    assert data.classes == ()
    assert data.y[:2].tolist() == [1000.5, 1007.5]
    assert schema_of(data).units == {"y": "€"}
    again = load(tmp_path / "t.csv", schema_of(data))
    np.testing.assert_array_equal(again.y, data.y)
    new = read_rows(tmp_path / "t.csv", schema_of(data), np.array([[0.0], [0.0], [1.0]]))
    assert new.y is not None
    assert new.y[1] == 1007.5
    few = load(write(tmp_path / "t.csv", base() | {"x": list(range(N)), "y": repeat("5%", "10%", "10%")}))
    assert few.classes == ("10%", "5%")


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "utf-16", "utf-16-le", "utf-8-sig", "utf-32"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_encodings(encoding: str, suffix: str, tmp_path: Path) -> None:
    columns = {"Größe": repeat(1.5, 2.5), "site": repeat("Zürich", "Genève"), "y": base()["y"]}
    sign = "\t" if suffix == ".tsv" else ";"
    data = load(write(tmp_path / f"t{suffix}", columns, sign=sign, encoding=encoding))
    assert data.owners == ("Genève", "Zürich")
    assert schema_of(data).numbers == ("Größe",)
    said = [note for note in data.notes if "The file is not UTF-8" in note]
    assert len(said) == (encoding != "utf-8-sig")
    told = load(tmp_path / f"t{suffix}", encoding=encoding)
    assert told.owners == data.owners
    assert not any("UTF-8" in note for note in told.notes)


def test_encodings_that_do_not_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", base() | {"x": repeat("ä", "é")}, encoding="cp1252")
    with pytest.raises(ConfigError, match="unknown encoding 'utf-99'"):
        load(path, encoding="utf-99")
    with pytest.raises(DataError, match=r"t\.csv is not UTF-8; give its encoding"):
        load(path, encoding="utf8")
    path.write_bytes(b"PK\x03\x04" + bytes(50))
    with pytest.raises(DataError, match="no CSV file but a zip archive"):
        load(path)


def test_spellings_of_clients_classes_and_categories(tmp_path: Path) -> None:
    columns: dict[str, Column] = {
        "site": repeat("Nord", "Nord ", "nord", "Süd"), "y": repeat("Ja", "ja", "nein", "Ja ", "Ja"),
        "ward": repeat("A  1", "a 1", " b"), "x": list(range(N)),
    }  # fmt: skip
    path = write(tmp_path / "t.csv", columns)
    apart = load(path)
    assert len(apart.owners) == 4
    assert apart.classes == ("Ja", "ja", "nein")
    assert schema_of(apart).categories == {"ward": ("A  1", "a 1", "b")}
    (said,) = [note for note in apart.notes if "--normalize-names" in note]
    assert "'site' ('Nord' = 'Nord ' = 'nord'), 'y' ('Ja' = 'ja'), 'ward' (" in said
    one = load(path, normalize_names=True)
    assert (one.owners, one.classes) == (("Nord", "Süd"), ("Ja", "nein"))
    assert schema_of(one).categories == {"ward": ("A  1", "b")}
    assert any("are one, as --normalize-names says" in note for note in one.notes)
    again = load(path, schema_of(one), normalize_names=True)
    np.testing.assert_array_equal(again.y, one.y)
    np.testing.assert_array_equal(again.x, one.x)
    new = read_rows(path, schema_of(one), np.array([[0.0], [0.0], [1.0]]))
    np.testing.assert_array_equal(new.y, one.y)
    assert any("which differ only in case or blanks" in note for note in new.notes)


def test_the_order_of_day_and_month(tmp_path: Path) -> None:
    unclear = repeat("01/02/2024", "03/04/2024")
    path = write(tmp_path / "t.csv", base() | {"when": unclear})
    first = dt.date(2024, 1, 2).toordinal() - dt.date(1970, 1, 1).toordinal()
    data = load(path)
    assert data.x[0, 0] == first
    assert any("'when' fit both" in note and "--set table.dates=day-first" in note for note in data.notes)
    for order, days in (("month-first", first), ("day-first", first + 30)):
        told = load(path, dates=order)
        assert told.x[0, 0] == days
        assert not any("--set" in note for note in told.notes)
    other = load(write(path, base() | {"when": unclear, "then": repeat("25/01/2024", "03/04/2024")}))
    assert other.x[0, 0] == first + 30
    assert any("as in the table's other columns" in note for note in other.notes)
    assert other.read_times is not None
    assert other.read_times("when").values[0] == first + 30
    clear = load(write(path, base() | {"when": repeat("01/25/2024", "03/04/2024")}), dates="day-first")
    assert schema_of(clear).dates == {"when": "%m/%d/%Y"}


def visits(n_subjects: int = 40, each: int = 5) -> dict[str, Column]:
    """Patients with several visits: sex, arm and age are theirs, and the rest is a visit's."""
    random = np.random.default_rng(0)
    who = np.repeat(np.arange(n_subjects), each)
    sex, arm, age = random.integers(2, size=n_subjects), random.integers(2, size=n_subjects), random.normal(50, 9, 99)
    n = len(who)
    return {
        "site": np.where(who % 2, "n", "s").tolist(), "subject": (who + 1).tolist(),
        "sex": np.array(["f", "m"])[sex[who]].tolist(), "arm": arm[who].tolist(), "age": age[who].round(1).tolist(),
        "visit": np.tile(np.arange(each), n_subjects).tolist(), "bp": random.normal(120, 9, n).round().tolist(),
        "y": np.array(["a", "b"])[random.integers(2, size=n)].tolist(),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["subject", "patient_id", "PatientID", "student", "s", "column7"])
@pytest.mark.parametrize("form", ["{}", "P{:03d}"])
def test_a_column_that_names_subjects_is_no_feature(name: str, form: str, tmp_path: Path) -> None:
    columns = visits()
    ids = [form.format(one) for one in columns.pop("subject")]
    path = write(tmp_path / "t.csv", columns | {name: ids})
    data = load(path)
    assert name not in schema_of(data).columns
    assert set(schema_of(data).columns) == {"sex", "arm", "age", "visit", "bp"}
    assert any("names what several rows belong to (40 values in 200 rows) and is left out." in s for s in data.notes)
    assert data.found_groups == name
    whole = partition_dataset(data)
    assert f"Rows with the same {name!r} stay in one part; --group-column off splits them." in whole.notes
    dropped, chosen = load(path, drop_columns=[name]), load(path, features=["age", "bp"])
    named = load(path, group_column=name)
    for grouped in (data, dropped, chosen, named):
        assert grouped.groups is not None
        assert grouped.groups.tolist() == np.repeat(np.arange(40), 5).tolist()
        assert name not in schema_of(grouped).columns
    alone = load(path, group_column="off")
    assert alone.groups is None
    assert not any("--group-column" in note for note in alone.notes)
    assert any("stay in one part; there are 40" in note for note in named.notes)
    chosen = load(path, features=[name, "age"], group_column=name)
    assert name in schema_of(chosen).columns


def test_subjects_numbered_anew_at_each_client(tmp_path: Path) -> None:
    columns = visits()
    columns["number"] = [(one - 1) // 2 + 1 for one in columns.pop("subject")]  # type: ignore[operator]
    data = load(write(tmp_path / "t.csv", columns))
    assert "number" not in schema_of(data).columns


def test_pupils_numbered_anew_at_each_school_are_no_groups(tmp_path: Path) -> None:
    """A few numbers come twice at a school, as in mlmRev's Exam."""
    number = [i // 2 + 1 for i in range(600)]
    number[2] = number[0]
    columns: dict[str, Column] = {"site": ["n", "s"] * 300, "y": ["a", "b", "b"] * 200, "x": [0.5, 1.5, 3.5, 0.1] * 150}
    path = write(tmp_path / "t.csv", columns | {"student": number})
    data = load(path)
    assert "student" not in schema_of(data).columns
    assert any("'student' counts or names the rows" in note for note in data.notes)
    assert data.groups is None


def test_a_client_with_few_subjects_is_split_by_rows(tmp_path: Path) -> None:
    """Two of three sites have 2 patients, too few for three parts: the option is left to the user."""
    columns = visits(24)
    columns["site"] = ["n" if one <= 20 else "s" if one <= 22 else "e" for one in columns["subject"]]  # type: ignore[operator]
    data = load(write(tmp_path / "t.csv", columns))
    assert data.groups is None
    assert any("to keep them together, give --group-column subject" in note for note in data.notes)


def test_a_split_by_time_has_no_groups(tmp_path: Path) -> None:
    columns = visits()
    columns["day"] = [f"2024-01-{1 + i % 28:02d}" for i in range(200)]
    path = write(tmp_path / "t.csv", columns)
    federation = load_federation(path, client_column="site", target="y", split="time")
    assert federation.groups is None
    save_manifest(federation, tmp_path / "p.json")
    again = load_federation(path, client_column="site", target="y", partition=str(tmp_path / "p.json"))
    assert again.groups is None
    assert not any("stay in one part" in note for note in again.notes)


def test_gaps_are_no_subjects(tmp_path: Path) -> None:
    columns = visits()
    columns["subject"] = ["" if i % 20 == 3 else one for i, one in enumerate(columns["subject"])]
    data = load(write(tmp_path / "t.csv", columns))
    assert data.groups is not None
    assert any("(40 values in 200 rows)" in note for note in data.notes)


@pytest.mark.parametrize("seed", range(5))
def test_ordinary_numbers_are_no_subjects(seed: int, tmp_path: Path) -> None:
    """Ages, years, counts, ratings, and what follows from them, also where rows of a county share numbers."""
    random = np.random.default_rng(seed)
    n = 600
    age, year, county = random.integers(18, 90, n), random.integers(1990, 2020, n), random.integers(40, size=n)
    income, rain = random.integers(20_000, 90_000, 40), random.normal(size=30).round(2)
    columns: dict[str, Column] = {
        "site": random.integers(4, size=n).tolist(), "age": age.tolist(), "age_group": (age // 10).tolist(),
        "is_old": (age > 65).tolist(), "born": (2020 - age).tolist(), "year": year.tolist(),
        "rain": rain[year - 1990].tolist(), "visits": random.poisson(30, n).tolist(),
        "rating": random.integers(1, 101, n).tolist(), "income": income[county].tolist(),
        "family": random.integers(1, 14, n).tolist(), "rare": (random.random(n) < 0.02).tolist(),
        "score": random.integers(0, 50, n).tolist(), "y": random.choice(["a", "b"], n).tolist(),
    }  # fmt: skip
    data = load(write(tmp_path / "t.csv", columns))
    assert set(schema_of(data).numbers) == set(columns) - {"site", "y"}


def test_a_column_is_no_evidence_for_itself(tmp_path: Path) -> None:
    """At a school, the few pupils of one test score share the score, and a score that follows from it."""
    random = np.random.default_rng(0)
    n, school = 1080, np.repeat(np.arange(60), 18)
    pretest = random.binomial(60, 0.5, n)
    columns: dict[str, Column] = {
        "site": school.tolist(), "pretest": pretest.tolist(), "percent": (5.0 * pretest + 1).tolist(),
        "x": random.normal(size=n).round(3).tolist(), "y": random.choice(["a", "b"], n).tolist(),
    }  # fmt: skip
    data = load(write(tmp_path / "t.csv", columns))
    assert set(schema_of(data).numbers) == {"pretest", "percent", "x"}
    assert data.groups is None


def test_groups_with_gaps_and_of_wrong_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", base() | {"x": list(range(N)), "who": repeat("u", "", "v", "")})
    groups = load(path, group_column="who").groups
    assert groups is not None
    assert groups[[0, 4]].tolist() == [0, 0]
    assert len(set(groups.tolist())) == 2 + N // 2
    with pytest.raises(DataError, match="no column 'whoo'; did you mean 'who'"):
        load(path, group_column="whoo")
    with pytest.raises(ConfigError, match="group_column is 'site', which is the client column"):
        load(path, group_column="site")


def test_the_client_as_a_feature(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", base() | {"site": repeat("01", "2"), "x": list(range(N))})
    data = load(path, client_feature=True)
    schema = schema_of(data)
    assert schema.categories == {"site": ("01", "2")}
    assert data.x[:2].tolist() == [[0, 1, 0], [1, 0, 1]]
    np.testing.assert_array_equal(load(path, schema).x, data.x)
    new = read_rows(path, schema, np.array([[0.0], [0.0], [1.0]]))
    np.testing.assert_array_equal(new.x, data.x)


def test_names_of_clients_that_are_numbers(tmp_path: Path) -> None:
    ones: list[object] = [None, *([7.0, 12.0] * 40)[: N - 1]]
    parquet.write_table(pa.table(base() | {"site": ones, "x": list(range(N))}), tmp_path / "t.parquet")
    assert load(tmp_path / "t.parquet").owners == ("12", "7")
    path = write(tmp_path / "t.csv", base() | {"site": repeat("7.0", "12.0"), "x": list(range(N))})
    assert load(path).owners == ("12", "7")
    assert load(write(path, base() | {"site": repeat("7.0", "1.5"), "x": list(range(N))})).owners == ("1.5", "7.0")
    assert load(write(path, base() | {"site": repeat("007", "08"), "x": list(range(N))})).owners == ("007", "08")


def test_classes_of_large_numbers_stay_apart(tmp_path: Path) -> None:
    large = (12345678901234567890, 12345678901234567891)
    path = write(tmp_path / "t.csv", base() | {"y": repeat(*large), "x": list(range(N))})
    assert load(path).classes == tuple(map(str, large))
    content = base() | {"y": repeat(*map(decimal.Decimal, large)), "x": list(range(N))}
    parquet.write_table(pa.table(content), tmp_path / "t.parquet")
    assert load(tmp_path / "t.parquet").classes == tuple(map(str, large))
    parquet.write_table(pa.table(content | {"y": repeat(1e300, 2e300)}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="in data row 1, and numbers of such a size are rounded"):
        load(tmp_path / "t.parquet", target_type="class")


def test_an_infinite_class_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", base() | {"y": ["inf", *repeat("1", "2")[1:]], "x": list(range(N))})
    with pytest.raises(DataError, match="target column 'y' holds inf in data row 1; correct it"):
        load(path)


def test_wide_tables_are_read_in_seconds(tmp_path: Path) -> None:
    """The names of all columns were listed for each column: 10,000 of them took 87 s."""
    numbers = np.random.default_rng(0).normal(size=(60, 4000)).round(2)
    columns = base() | {f"g{i}": column for i, column in enumerate(numbers.T.tolist())}
    write(tmp_path / "t.csv", columns)
    start = time.process_time()
    data = load(tmp_path / "t.csv")
    assert data.x.shape == (60, 4000)
    assert time.process_time() - start < 12


def test_excel_sheets(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.title = "data"
    sheet.append(["site", "age", "when", "spend", "note", "y", None])
    for i in range(N):
        day = dt.datetime(2024, 1, 1 + i % 28)
        sheet.append(["ns"[i % 2], 20 + i if i else None, day, f"{i},5 kg", i if i % 2 else "x", "ab"[i % 3 % 2], None])
    book.create_sheet("more")
    book.save(tmp_path / "t.xlsx")
    data = load(tmp_path / "t.xlsx")
    assert schema_of(data).numbers == ("age", "when", "spend")
    assert schema_of(data).units == {"spend": "kg"}
    assert data.x[1, :3].tolist() == [21, 19724, 1.5]
    assert "The sheet 'data' is read; not read: 'more'." in data.notes
    np.testing.assert_array_equal(load(tmp_path / "t.xlsx", schema_of(data)).x, data.x)
    (tmp_path / "t.xlsx").write_bytes(b"no sheet")
    with pytest.raises(DataError, match="cannot be read as Excel"):
        load(tmp_path / "t.xlsx")
    (tmp_path / "t.xls").write_bytes(b"old")
    with pytest.raises(DataError, match=r"reads no \.xls files; save it as \.xlsx or CSV"):
        load(tmp_path / "t.xls")


def test_excel_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.xlsx").write_bytes(b"any")
    monkeypatch.setattr("fedattune.data.tables.excel.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fedattune\[excel\]', or save it as CSV"):
        load(tmp_path / "t.xlsx")


def test_class_codes_of_a_schema_stay_codes(tmp_path: Path) -> None:
    """Pyarrow reads 01 as 1 where a node has such codes only; a 3 of the schema may be written 3.0."""
    schema = Schema(classes=("01", "02", "3"), numbers=("x",), target="y")
    path = write(tmp_path / "t.csv", base() | {"y": repeat("01", "02", "02"), "x": list(range(N))})
    assert load(path, schema).y[:3].tolist() == [0, 1, 1]
    new = read_rows(path, schema, np.array([[0.0], [0.0], [1.0]]))
    assert new.y is not None
    assert new.y[:3].tolist() == [0, 1, 1]
    mixed = write(tmp_path / "t.csv", base() | {"y": ["3.0", "", *repeat("3.0", "07")[2:]], "x": list(range(N))})
    assert read_rows(mixed, schema, np.array([[0.0], [0.0], [1.0]])).notes[1:] == [
        "column 'y' holds '07', which is no class of the model (known: 01, 02, 3); such rows do not count in the "
        "accuracy"
    ]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_true_and_false_with_a_gap_are_classes(suffix: str, tmp_path: Path) -> None:
    truths: list[bool | None] = [True, None, *[False, True] * (N // 2 - 1)]
    path = tmp_path / f"t{suffix}"
    if suffix == ".csv":
        write(path, base() | {"x": list(range(N)), "y": ["" if one is None else str(one).lower() for one in truths]})
    else:
        parquet.write_table(pa.table(base() | {"x": list(range(N)), "y": truths}), path)
    data = load(path)
    assert data.classes == ("False", "True")
    new = read_rows(path, schema_of(data), np.array([[0.0], [0.0], [1.0]]))
    assert new.y is not None
    assert new.y[:4].tolist() == [1, -1, 0, 1]
    assert new.notes == ["not used: the column 'site'"]
    (problem,) = find_table_problems(path, schema_of(data), client_column="site", target="y")
    assert "target column 'y' lacks 1 of 60 values" in problem
