"""A column of text as token numbers: by characters and by a tokenizer, in schemas, at nodes and for new rows."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedattune import ConfigError, DataError, load_federation
from fedattune.data import Schema, infer_schema, load_table
from fedattune.data.schema import merge_schemas
from fedattune.data.tables.new_rows import read_rows
from fedattune.data.tables.texts import ALPHABET, encode_texts
from models.pretrained_files import WORDS, make_network

LINES = ["who,line,next", *(f'{"ab"[i % 2]},"{"to be, or not"[: 5 + i % 4]}",{"xyz"[i % 3]}' for i in range(40))]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "lines.csv"
    file.write_text("\n".join([*LINES, ""]))
    return file


def texts(*values: str | None) -> np.ndarray:
    return np.array(values, dtype=object)


def test_characters_keep_the_end_of_the_text() -> None:
    out = encode_texts(texts("ab", "Äb", None, "xyzab"), "characters", 3)
    a, b, z = (ALPHABET.index(one) + 1 for one in "abz")
    assert out.tolist() == [[-1, a, b], [-1, 0, b], [-1, -1, -1], [z, a, b]]
    assert out.dtype == np.float32


def test_a_tokenizer_keeps_the_beginning(tmp_path: Path) -> None:
    folder = make_network(tmp_path, "bert")
    out = encode_texts(texts("good ball", "the a bank price poor", None, "new"), folder, 4)
    good, ball, the, a, bank, price, unknown = map(WORDS.index, ["good", "ball", "the", "a", "bank", "price", "[UNK]"])
    assert out.tolist() == [[good, ball, -1, -1], [the, a, bank, price], [-1] * 4, [unknown, -1, -1, -1]]
    with pytest.raises(ConfigError, match=r"the tokenizer '.*none' cannot be loaded"):
        encode_texts(texts("a"), str(tmp_path / "none"), 4)


def test_a_table_is_read_as_tokens(table: Path) -> None:
    data = load_federation(table, client_column="who", target="next", options={"tokens": "characters", "max_tokens": 6})
    assert data.input_shape == (6,)
    assert torch.equal(data.x, data.x.round())
    schema = infer_schema(data)
    assert (schema.tokens, schema.max_tokens, schema.columns) == ({"line": "characters"}, 6, ("line",))
    assert "The text of column 'line' is read as at most 6 tokens (characters)." in data.notes
    again = load_table(table, Schema.from_json(schema.to_json()), client_column="who", target="next")
    np.testing.assert_array_equal(again.x, data.x.numpy())
    rows = read_rows(table, schema, np.zeros((3, 0)))
    np.testing.assert_array_equal(rows.x, data.x.numpy())


def test_characters_as_classes(tmp_path: Path) -> None:
    """The next character may be a space, a comma or a sign that means a missing value elsewhere."""
    file = tmp_path / "next.csv"
    cells = [" ", '","', "?", "-", "a"] * 4
    file.write_text("who,line,next\n" + "".join(f"{i % 2},abc,{cell}\n" for i, cell in enumerate(cells)))
    data = load_table(file, client_column="who", target="next", tokens="characters", max_tokens=3)
    assert data.classes == (" ", ",", "-", "?", "a")
    assert len(data.y) == 20


def test_other_features_are_refused(table: Path) -> None:
    table.write_text("who,age,line,next\n" + "".join(f"{'ab'[i % 2]},{i},one two,{'xy'[i % 2]}\n" for i in range(20)))
    with pytest.raises(DataError, match="got 2 features, 'age', 'line'; give --set features=line, or --drop"):
        load_table(table, client_column="who", target="next", tokens="characters")
    data = load_table(table, client_column="who", target="next", tokens="characters", features="line")
    assert data.x.shape == (20, 64)


def test_schemas_of_tokens() -> None:
    schema = Schema(classes=("x", "y"), tokens={"line": "characters"}, max_tokens=6, target="next")
    assert schema.input_shape == (6,)
    assert merge_schemas([schema, schema]) == schema
    with pytest.raises(DataError, match="must read their text alike"):
        merge_schemas([schema, schema.model_copy(update={"max_tokens": 7})])
    with pytest.raises(DataError, match="expected max_tokens 6, got 7"):
        schema.check(schema.model_copy(update={"max_tokens": 7, "input_shape": (6,)}), "node b")
    for wrong, why in (
        ({"numbers": ["age"]}, "no other feature beside it"),
        ({"max_tokens": None}, "go together"),
        ({"tokens": {"a": "characters", "b": "characters"}}, "one column is read as tokens"),
        ({"target": "line"}, "one of the features"),
        ({"scale": 2.0}, "token numbers are not scaled"),
    ):
        values = {"classes": ["x", "y"], "tokens": {"line": "characters"}, "max_tokens": 6, "target": "next"}
        with pytest.raises(ValidationError, match=why):
            Schema.model_validate(values | wrong)
