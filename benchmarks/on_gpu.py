"""Spend some minutes on a machine with a GPU, most valuable work first: `python -m benchmarks.on_gpu`.

The items are the tests on a GPU, the cases of W10, and columns of the papers' tables. A piece of an item whose time is
over is interrupted, and goes on in a later piece: after the other items, or in the next call. After each piece, all
results are packed into archives, to be unpacked at the repository's root.

Studies train in float32. pFedLA's search is its study's: six runs of 100 rounds a column. IGFL's would be 45 runs of
300 rounds beside final runs of thousands, which no lent minutes hold: its columns take the middle value of each grid
(`--no-search`). FedAM's table has no grid. Archives have the runs that ended. Others lie in the folder `runs` of the
results, and are lost with the machine; fewer `--processes` end their first runs sooner. pFedMe on CIFAR10 is an item of
its own and the last, since its steps are not recorded there: its 600 rounds take most of an hour.
"""

import argparse
import datetime as dt
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedattune.core.hardware import find_processor_name
from fedattune.core.io import read_json, replace_atomically, write_json
from fedattune.studies import load_study

from . import gpu
from .options import run_command

ROOT = Path(__file__).parent.parent
GRACE_S = LEAST_S = 60
"""Seconds to end a piece and to pack, and seconds without which no piece begins; less within 20 minutes."""
STUDY_FILES = ("table.md", "results.csv", "history.parquet", "runs.json", "claims.csv", "figure.svg")
SEARCHED, UNSEARCHED = "pfedla-table1", tuple(f"igfl-table{number}" for number in range(1, 6))

State = dict[str, dict[str, Any]]
"""item -> `state` (done, open, failed), `goal`, card, date, and of all its pieces the number and seconds."""


@dataclass(frozen=True)
class Item:
    """Arguments of Python, to run until they end well; a new `goal` opens a done item again."""

    name: str
    words: tuple[str, ...]
    goal: str = ""
    cases: tuple[str, ...] = ()  # of the benchmarks: a piece measures those that are missing

    @property
    def log(self) -> str:
        return re.sub(r"[^\w.-]+", "-", self.name) + ".log"

    def has_name(self, name: str) -> bool:
        return f"{self.name}/".startswith(f"{name}/")

    def find_state(self, state: State) -> str:
        known = state.get(self.name, {})
        return known["state"] if known.get("goal") == self.goal else "open"


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command's arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_gpu", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--minutes", type=float, default=14, help="time of the whole command (default: %(default)s)")
    add("--piece-minutes", type=float, default=8, help="time of a piece (default: %(default)s)")
    add("--out", type=Path, default=Path("on-gpu"), help="folder of state, logs and archives (default: %(default)s)")
    add("--results", type=Path, default=Path("results"), help="folder of all studies (default: %(default)s)")
    add("--data-dir", type=Path, metavar="DIR", help="folder with the data sets' files, instead of a download")
    add("--seeds", type=int, default=1, metavar="N", help="runs of each cell (default: %(default)s)")
    processes = max(1, min(15, (os.cpu_count() or 1) - 1))
    add("--processes", type=int, default=processes, metavar="N", help="runs at the same time (default: %(default)s)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where to compute (default: %(default)s)")
    add("--max-mb", type=float, default=16, help="size of an archive (default: %(default)s)")
    add("--only", default="", metavar="NAME[,NAME]", help="only these items; a study stands for all of its columns")
    add("--list", action="store_true", help="list the items with their state")
    add("--quick", action="store_true", help="do next to nothing, to test the command")
    return parser


def list_columns() -> list[tuple[str, str, str]]:
    """List the columns of the papers' tables, each with its study and cells, the most valuable first."""
    slow, column = "pFedMe", "CIFAR10 10 clients"
    others = ",".join(f"{column}/{row}" for row in load_study(SEARCHED).rows if row != slow)
    first = [(SEARCHED, column, others), (SEARCHED, "FMNIST 10 clients", "FMNIST 10 clients")]
    more = [(study, one, one) for study in (*UNSEARCHED, "fedam-table") for one in load_study(study).columns]
    return [*first, *more, (SEARCHED, f"{slow} on CIFAR10", f"{column}/{slow}")]


def list_items(given: argparse.Namespace) -> list[Item]:
    """List all items, the most valuable first."""
    goal, measure = given.device, ["-m", "benchmarks", "--device", given.device]
    if not given.quick:
        tests, cases = "tests/training/test_gpu.py", tuple(case.name for case in gpu.CASES)
        columns = list_columns()
    else:
        goal, measure = f"quick-{goal}", [*measure, "--quick"]
        tests, cases = "tests/core/test_text.py", ("W7-pfedla-100",)
        columns = [("fedmcsa-table2", "Synthetic MLR", "Synthetic MLR/FedAvg")]
    items = [Item("tests", ("-m", "pytest", "-q", "-p", "no:cacheprovider", tests), goal)]
    items.append(Item("W10", tuple(measure), goal, cases))
    for study, name, cells in columns:
        items.append(Item(f"{study}/{name}", make_words(study, cells, given), f"{goal}, {given.seeds} seeds"))
    return items


def make_words(study: str, cells: str, given: argparse.Namespace) -> tuple[str, ...]:
    """Make the arguments that train some cells of a study."""
    words = ["-m", "fedattune", "reproduce", study, "--cells", cells, "--seeds", str(given.seeds), "--resume"]
    words += ["-o", str(given.results.resolve()), "--device", given.device, "--processes", str(given.processes)]
    words += ["--mixed-precision", "off", *([] if study == SEARCHED else ["--no-search"])]
    words += ["--rounds", "1"] if given.quick else []
    return (*words, *(["--data-dir", str(given.data_dir.resolve())] if given.data_dir else []))


def make_command(item: Item, out: Path, pieces: int) -> list[str]:
    """Make the command of an item's next piece, after so many pieces."""
    if not item.cases:
        return [sys.executable, *item.words]
    files, measured = list(out.glob(f"W10-{item.goal}-*.json")), set[str]()
    for file in files:
        with suppress(ValueError):  # a piece was killed while it wrote
            said = json.loads(file.read_text("utf-8"))
            measured |= {*said["skipped"], *(case["name"] for case in said["cases"])}
    missing = [case for case in item.cases if case not in measured] or ["--list"]
    first = pieces % len(missing)  # begin elsewhere than a case that failed, or that takes a whole piece
    file = out.resolve() / f"W10-{item.goal}-{len(files) + 1}.json"
    return [sys.executable, *item.words, "--json", str(file), *missing[first:], *missing[:first]]


def run_piece(command: Sequence[str], log: Path, seconds: float, grace: float) -> tuple[int, bool]:
    """Run a command into a log; return its exit code, and whether its time was over."""
    path = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    with log.open("ab") as file:
        file.write(f"\n== {dt.datetime.now():%Y-%m-%d %H:%M}, at most {seconds:.0f} s\n".encode())
        file.flush()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=ROOT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        is_late = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:  # also when this command itself is interrupted
            stop(process, grace)
    return process.returncode, is_late


def stop(process: "subprocess.Popen[bytes]", grace: float) -> None:
    """Interrupt a process and its children, then terminate, then kill them; do nothing if none is left."""
    for number, wait in ((signal.SIGINT, grace / 2), (signal.SIGTERM, grace / 4)):  # the rest is for packing
        if process.poll() is None:
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(wait)
    with suppress(ProcessLookupError, PermissionError):  # nobody is left; on a Mac, only the dead
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def advance(item: Item, state: State, given: argparse.Namespace, seconds: float, grace: float) -> str:
    """Run a piece of an item, note and print what came of it, and return the item's state."""
    note: dict[str, Any] = {"pieces": 0, "seconds": 0.0, **state.get(item.name, {})}
    state[item.name] = note
    note |= {"state": "open", "goal": item.goal, "tail": [], "date": f"{dt.datetime.now().astimezone():%F %T%z}"}
    note["card"] = torch.cuda.get_device_name() if given.device == "cuda" else find_processor_name()
    print(f"{item.name}: at most {seconds:.0f} s ...", end=" ", flush=True)
    start, log = time.monotonic(), given.out / item.log
    code, is_late = run_piece(make_command(item, given.out, note["pieces"]), log, seconds, grace)
    took = time.monotonic() - start
    outcome = "done" if code == 0 else "open" if is_late else "failed"
    said = {"done": "done", "open": "interrupted", "failed": f"failed with exit code {code}"}[outcome]
    note |= {
        "state": outcome,
        "exit code": code,
        "pieces": note["pieces"] + 1,
        "seconds": round(note["seconds"] + took, 1),
    }
    if outcome == "failed":
        note["tail"] = log.read_text("utf-8", "replace").splitlines()[-15:]
    print("\n  ".join([f"{took:.0f} s, {said}", *note["tail"][-5:]]), flush=True)
    return outcome


def go_down(items: Sequence[Item], state: State, given: argparse.Namespace) -> None:
    """Run pieces of what is not done until the time is over; what failed in an earlier call comes last."""
    limit, end = given.minutes * 60, time.monotonic() + given.minutes * 60
    grace, least = min(GRACE_S, limit / 20), min(LEAST_S, limit / 20, given.piece_minutes * 60)
    waiting = [item for item in items if item.find_state(state) != "done"]
    waiting.sort(key=lambda item: item.find_state(state) == "failed")
    while waiting and (left := end - time.monotonic() - grace) >= least:
        item = waiting.pop(0)
        if advance(item, state, given, min(given.piece_minutes * 60, left), grace) == "open":
            waiting.append(item)
        pack(state, given)


def pack(state: State, given: argparse.Namespace) -> tuple[list[Path], list[str]]:
    """Pack the state, logs, figures and studies, split by file; return the archives, and the names of larger files."""
    write_json(given.out / "state.json", state)
    own = [path for kind in ("state.json", "*.log", "W10-*.json") for path in sorted(given.out.glob(kind))]
    files = {f"{given.out.name}/{path.name}": path for path in own}
    for study in dict.fromkeys(name.partition("/")[0] for name in state if "/" in name):
        files |= {f"results/{study}/{name}": given.results / study / name for name in STUDY_FILES}
    groups, left_out, limit, room = list[list[str]](), list[str](), given.max_mb * 1e6 - 100, 0.0
    for name in [name for name, path in files.items() if path.exists()]:
        size = len(zlib.compress(files[name].read_bytes())) + 2 * len(name.encode()) + 200  # and what a member needs
        if size > limit:
            left_out.append(name)
            continue
        if size > room:
            groups, room = [*groups, []], limit
        groups[-1].append(name)
        room -= size
    archives = [given.out / f"carry-{number}.zip" for number in range(1, len(groups) + 1)]
    for archive, names in zip(archives, groups, strict=True):
        with replace_atomically(archive) as new, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as file:
            for name in names:
                file.write(files[name], name)
    for old in {*given.out.glob("carry-*.zip")} - {*archives}:
        old.unlink()
    return archives, left_out


def choose_items(parser: argparse.ArgumentParser, given: argparse.Namespace) -> list[Item]:
    """Choose the items that `--only` names, by default all; end the command if a number or a name is wrong."""
    for name in ("minutes", "piece_minutes", "seeds", "processes", "max_mb"):
        if getattr(given, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    items, names = list_items(given), [name.strip() for name in given.only.split(",") if name.strip()]
    for name in names:
        if not any(item.has_name(name) for item in items):
            parser.error(f"--only: no item is called {name!r}; --list shows all")
    return [item for item in items if not names or any(map(item.has_name, names))]


def report(items: Sequence[Item], state: State, given: argparse.Namespace) -> int:
    """Print what is done and open, and which archives to carry home; return 1 if an item failed."""
    archives, left_out = pack(state, given)
    found = {word: [i.name for i in items if i.find_state(state) == word] for word in ("done", "failed", "open")}
    print("\n".join(f"{word}: {', '.join(names) or 'nothing'}" for word, names in found.items()))
    print(f"carry home: {', '.join(map(str, archives)) or 'nothing'}")
    for name in left_out:
        print(f"left out: {name} is larger than {given.max_mb:g} MB")
    return 1 if found["failed"] else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the time allows; return 1 if an item failed, 2 without a GPU, and 130 after an interruption."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    items, file = choose_items(parser, given), given.out / "state.json"
    state: State = read_json(file) if file.exists() else {}
    if given.list:
        print("\n".join(f"{item.find_state(state):<7} {item.name}" for item in items))
        return 0
    if given.device == "cuda" and not torch.cuda.is_available():
        print("PyTorch finds no GPU here; --device cpu goes down the list without one.", file=sys.stderr)
        return 2
    for folder in (given.out, given.results):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        go_down(items, state, given)
    except KeyboardInterrupt:
        print("interrupted")
        report(items, state, given)
        return 130
    return report(items, state, given)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # then, too, the piece is stopped and packed
    run_command(main)
