"""Damage copies of run folders as disks, editors and strangers do, and see what commands say about them."""

import contextlib
import io
import json
import random
import re
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedattune.cli import main

VALUES: Sequence[Any] = (
    None, True, -1, 0, 3, 10**30, 1.5, -0.5, 1e308, "", "x", "../../etc/passwd", "<b>", [], [1], [[]], [None], {},
    {"a": 1},
    "\x1b[31m", "subprocess:call", "1e999", "NaN",
)  # fmt: skip
"""Values that take the place of one in a JSON file."""
CELLS: Sequence[Any] = (None, -1, 0, 7, 10**15, 1.5, float("inf"), "x", "[]", "[99]", "[null]", "{}", b"", b"x" * 9)
"""Values that take the place of one in a store."""


class Outcome(NamedTuple):
    """What a command did: its exit code, all that it printed, and the file that it wrote."""

    code: int
    out: str
    err: str
    file: str


Damage = Callable[[random.Random, Path], str | None]


def list_files(folder: Path, *suffixes: str) -> list[Path]:
    """List the files that commands read back, in a fixed order."""
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and file.name != "report.html" and (not suffixes or file.suffix in suffixes)
    )


def flip_bits(random_: random.Random, folder: Path) -> str | None:
    """Flip up to three bits of a file."""
    file = random_.choice([one for one in list_files(folder) if one.stat().st_size])
    content = bytearray(file.read_bytes())
    for _ in range(random_.randint(1, 3)):
        content[random_.randrange(len(content))] ^= 1 << random_.randrange(8)
    file.write_bytes(content)
    return f"bits of {file.relative_to(folder)}"


def cut(random_: random.Random, folder: Path) -> str | None:
    """Cut a file, or add something to it."""
    file = random_.choice(list_files(folder))
    content = file.read_bytes()
    if random_.random() < 0.2:
        file.write_bytes(content + random_.randbytes(random_.randint(1, 99)))
        return f"longer {file.relative_to(folder)}"
    file.write_bytes(content[: random_.randrange(len(content) + 1)])
    return f"cut {file.relative_to(folder)}"


def swap(random_: random.Random, folder: Path) -> str | None:
    """Let one file take the content of another, of the same name if there is one; or lose it."""
    file = random_.choice(list_files(folder))
    # A run without its result is one that is not finished, which every command says.
    if random_.random() < 0.3 and file.name != "result.json":
        file.unlink()
        return f"lost {file.relative_to(folder)}"
    same = [one for one in list_files(folder) if one.name == file.name and one != file]
    other = random_.choice(same if same and random_.random() < 0.8 else list_files(folder))
    shutil.copyfile(other, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)
    return f"{file.relative_to(folder)} from {other.relative_to(folder)}"


def edit_json(random_: random.Random, folder: Path) -> str | None:
    """Change, remove or add one value in a JSON file."""
    file = random_.choice(list_files(folder, ".json"))
    try:
        content = json.loads(file.read_text("utf-8"))
    except ValueError:
        return None
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, one in items:
            places.append((value, key))
            visit(one)

    visit(content)
    where = "the whole"
    if not places or random_.random() < 0.02:
        content = random_.choice(VALUES)
    else:
        # Values near the root decide more than the thousandth number of a list.
        owner, key = random_.choice(places[:40] if random_.random() < 0.5 else places)
        where = str(key)
        if random_.random() < 0.15:
            del owner[key]
        elif isinstance(owner[key], int | float) and random_.random() < 0.4:
            owner[key] = owner[key] * 2 + 1
        else:
            owner[key] = random_.choice(VALUES)
    file.write_text(json.dumps(content), "utf-8")
    return f"{where} of {file.relative_to(folder)}"


def edit_store(random_: random.Random, folder: Path) -> str | None:
    """Change, remove or double one cell or row of a store."""
    file = random_.choice(list_files(folder, ".sqlite"))
    db = sqlite3.connect(file)
    with contextlib.closing(db), contextlib.suppress(sqlite3.DatabaseError), db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        table = random_.choice(tables)
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        column = random_.choice(columns)
        rows = db.execute(f"SELECT {', '.join(columns)} FROM {table}").fetchall()
        action = random_.choice(["set", "set", "set", "delete", "drop", "add", "blob"])
        where = " AND ".join(f"{name} IS ?" for name in columns)
        if action == "drop":
            db.execute(f"DROP TABLE {table}")
        elif rows and action == "delete":
            db.execute(f"DELETE FROM {table} WHERE {where}", random_.choice(rows))
        elif rows and action in ("set", "blob"):
            row, cell = random_.choice(rows), random_.choice(CELLS)
            if action == "blob":
                cell = random_.choice([value for one in rows for value in one])
            db.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (cell, *row))
        else:
            row = [random_.choice([1, 99, "x", None, b"x"]) for _ in columns]
            db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
        return f"{action} {table}.{column} of {file.relative_to(folder)}"
    return None


DAMAGES: Sequence[Damage] = (flip_bits, cut, swap, edit_json, edit_json, edit_json, edit_store, edit_store)


def run_command(words: str, folder: Path, *, target: Path) -> Outcome:
    """Run a command in this process; FOLDER and FILE in its words are the folder and a file to write."""
    target.unlink(missing_ok=True)
    argv = [word.replace("FOLDER", str(folder)).replace("FILE", str(target)) for word in words.split()]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    content = target.read_bytes().decode("latin-1") if target.exists() else ""
    content = re.sub(r"<footer>.*</footer>", "", content)

    def place(text: str) -> str:
        return text.replace(str(folder), "FOLDER").replace(str(target), "FILE")

    return Outcome(code, place(out.getvalue()), place(err.getvalue()), place(content))


def judge(now: Outcome, before: Outcome) -> str:
    """Judge an outcome: same, refused, noted (another answer with a word on why), traceback, or other numbers."""
    if now == before:
        return "same"
    said = now.err.strip()
    if now.code == 2 and said.startswith("fedattune: error: ") and "\n" not in said and "Traceback" not in said:
        return "refused"
    if "internal error" in now.err or "Traceback" in now.err:
        return "traceback"
    return "other"
