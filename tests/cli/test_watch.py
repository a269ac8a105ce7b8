"""fedattune watch: what is shown of runs that wait, train, were stopped, failed or finished, and when it ends."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fedattune.analysis.output.report
from cli_helpers import Done
from crafted import BETTER, HALF, craft, experiment, going
from fedattune.analysis.monitor import RunStatus
from fedattune.cli import watch as watching_command
from fedattune.cli.watch import fit_terminal, print_changes, print_status
from fedattune.core.io import write_json
from fedattune.runs.folder import RunFolder
from fedattune.runs.store import RoundRecord, RunStore

Cli = Callable[..., Done]


# --- what is printed ----------------------------------------------------------------------------------


def terminal(width: int, height: int) -> Console:
    return Console(file=StringIO(), force_terminal=True, width=width, height=height, color_system=None)


def frame(lines: list[RunStatus], width: int, height: int, run: Path = Path("out")) -> list[str]:
    console = terminal(width, height)
    console.print(fit_terminal(lines, run, console))
    assert isinstance(console.file, StringIO)
    return [row.rstrip() for row in console.file.getvalue().splitlines()]


MANY = [
    *(RunStatus(f"method{i}", 0, "finished", 300, 300, 0.95, 0.8, 0.01, 10**7, 400.0, absent=3) for i in range(20)),
    RunStatus("running-one", 0, "running", 10, 300, 0.9, 0.7, -0.05, 10**6, 20.0, absent=1),
    *(RunStatus(f"waiting{i}", 0, "waiting", 0, 300) for i in range(10)),
]


def test_splits_are_told_apart_and_a_line_is_printed_once() -> None:
    lines = [RunStatus("local", 0, "finished", 9, 9, 0.9, split=0), RunStatus("local", 0, "running", 3, 9, split=1)]
    console = Console(file=StringIO(), width=200)
    print_changes(lines, [], console)
    print_changes(lines, lines, console)
    assert isinstance(console.file, StringIO)
    said = console.file.getvalue().splitlines()
    assert [line.partition(",")[0] for line in said] == ["local (split 0): finished", "local (split 1): running"]


@pytest.mark.parametrize(("width", "height"), [(120, 50), (100, 24), (60, 24), (45, 12)])
def test_the_live_table_fits_the_terminal_and_shows_who_trains(width: int, height: int) -> None:
    rows = frame(MANY, width, height)
    assert len(rows) < height
    assert max(map(len, rows)) <= width
    assert any("running-one" in row and "running" in row and "90.00" in row for row in rows)
    hidden = height < 40
    assert any(row.startswith("and ") and "waiting" in row for row in rows) == hidden


def test_of_a_deployment_nodes_are_named_while_it_runs(tmp_path: Path) -> None:
    run = experiment(tmp_path / "out")
    nodes = [
        {"name": "north", "online": True, "fault": None},
        {"name": "east", "online": True, "fault": "late"},
        {"name": "west", "online": False, "fault": "failed"},
        {"name": "south", "online": True, "fault": "refused"},
    ]
    write_json(run / "nodes.json", {"nodes": nodes})

    def printed(line: RunStatus) -> str:
        console = terminal(200, 30)
        print_status([line], run, console)
        assert isinstance(console.file, StringIO)
        return console.file.getvalue()

    text = printed(RunStatus("fedavg", 0, "running", 3, 9, 0.5))
    assert "nodes: 3 of 4 online; late: east; offline: west; refused: south" in text
    assert "nodes:" not in printed(RunStatus("fedavg", 0, "finished", 9, 9, 0.5))


def test_plain_lines_only_of_what_changed() -> None:
    def told(lines: list[RunStatus], before: list[RunStatus]) -> str:
        console = Console(file=StringIO(), width=500)
        print_changes(lines, before, console)
        assert isinstance(console.file, StringIO)
        return console.file.getvalue()

    first = [RunStatus("local", 0, "running", 3, 9, 0.5, 0.25, None, 0, 3.0), RunStatus("fedavg", 0, "waiting", 0, 9)]
    assert told(first, []) == (
        "local: running, round 3 of 9, mean 50.00%, worst 10% 25.00%, 0 B, 3 s so far, about 6 s left\n"
        "fedavg: waiting\n"
    )
    assert told(first, first) == ""
    after = [
        first[0],
        RunStatus("fedavg", 0, "failed", 2, 9, absent=4, diverged=1, failure="fedavg failed with seed 0: x"),
    ]
    assert told(after, first) == (
        "fedavg: failed, round 2 of 9, 0 B, 0 s so far, 4 absent, 1 diverged; fedavg failed with seed 0: x\n"
    )


# --- the command --------------------------------------------------------------------------------------


def finished(folder: Path) -> Path:
    out = experiment(folder)
    craft(out, "local", HALF, rounds=2, definition="")
    craft(out, "fedavg", BETTER, rounds=2, definition="", moved=500)
    return out


def test_of_finished_runs_come_table_verdict_and_report(cli: Cli, work: Path) -> None:
    done = cli("watch", finished(work / "out"), "-o", "r.html")
    assert done.code == 0
    assert "fedavg: finished, round 2 of 2, mean 62.50%, +10.00 points to local" in done.out
    assert "accuracy %: mean over clients on test rows" in done.out
    assert "No clear gain from collaborating is shown here" in done.out
    assert done.out.endswith("The report is r.html\n")
    assert "<html" in (work / "r.html").read_text()


def test_once_prints_where_they_stand_and_leaves(cli: Cli, work: Path) -> None:
    out = going(experiment(work / "out"), "local", HALF)
    done = cli("watch", out, "--once", "-o", "r.html")
    assert done.code == 0
    assert "2 of 10" in done.out
    assert "waiting" in done.out
    assert "BMTA*" not in done.out
    assert "Not finished" in (work / "r.html").read_text()
    empty = cli("watch", experiment(work / "empty"), "--once", "-o", "e.html")
    assert empty.code == 0
    assert "No round is finished yet." in empty.out
    assert not (work / "e.html").exists()


def test_it_ends_by_itself_and_renews_the_report_when_something_is_new(
    cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = going(experiment(work / "out"), "local", HALF)
    craft(out, "fedavg", HALF, rounds=2)
    written: list[list[int]] = []
    monkeypatch.setattr(
        fedattune.analysis.output.report,
        "write_report",
        lambda path, runs: written.append([run.rounds for run in runs.results]),
    )
    looks: list[float] = []

    def later(seconds: float) -> None:
        """What happens between two looks: nothing, then a round, then the end."""
        looks.append(seconds)
        if len(looks) == 1:
            return
        store = RunStore(out / "local" / "seed-0" / "metrics.sqlite")
        store.add_round(RoundRecord(len(looks) + 1, 9.0, 1_500, 1_500, 100, []))
        store.commit()
        store.close()
        if len(looks) == 3:
            facts = json.loads((out / "local" / "seed-0" / "facts.json").read_text())
            RunFolder(out / "local" / "seed-0").finish({"facts": facts})

    monkeypatch.setattr(watching_command.time, "sleep", later)
    monkeypatch.setattr(watching_command, "REPORT_TIME_SHARE", 1e9)  # at every look
    done = cli("watch", out, "--every", "7", "-o", "r.html")
    assert done.code == 0
    assert looks == [7.0] * 3
    assert written == [[2, 2], [3, 2], [4, 2]]
    assert [line for line in done.out.splitlines() if line.startswith("local:")] == [
        "local: running, round 2 of 10, mean 52.50%, worst 10% 50.00%, 2.0 kB, 4 s so far, about 16 s left",
        "local: running, round 3 of 10, mean 52.50%, worst 10% 50.00%, 3.0 kB, 9 s so far, about 21 s left",
        "local: finished, round 4 of 10, mean 52.50%, worst 10% 50.00%, 3.0 kB, 9 s so far",
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["none"], "none holds no run (there is no such folder)"),
        (["."], ". holds no run"),
        (["out", "--every", "0.1"], "--every: input should be greater than or equal to 0.5"),
        (["out", "--evry", "3"], "unknown option --evry, did you mean '--every'?"),
        (["out", "-o", "no/r.html"], "there is no folder no"),
        (["out", "-o", "out/experiment.yaml"], "this is a file of the run in"),
        ([], "RUN"),
    ],
)
def test_what_cannot_be_is_exit_code_2(cli: Cli, work: Path, argv: list[str], message: str) -> None:
    finished(work / "out")
    done = cli("watch", *argv)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1


def test_ctrl_c_leaves_without_a_trace(cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watching_command.time, "sleep", leave)
    done = cli("watch", experiment(work / "out"))
    assert (done.code, done.err) == (130, "fedattune: left; the runs go on\n")


@pytest.mark.deployed
def test_a_comparison_is_watched_on_a_real_terminal_to_its_end(start: Any, work: Path) -> None:
    from cli_helpers import environment

    trains = start(
        "compare", "--data", "digits", "--clients", 4, "--algorithms", "local,fedavg", "--rounds", 30, "-o", "out",
        "--quiet",
    )  # fmt: skip
    until = time.monotonic() + 60
    while not (work / "out" / "experiment.yaml").exists() and time.monotonic() < until:
        time.sleep(0.05)
    mine, theirs = pty.openpty()
    command = [sys.executable, "-m", "fedattune", "watch", "out", "--every", "0.5"]
    env = environment() | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    watches = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, cwd=work, env=env)
    os.close(theirs)
    text = b""
    while True:
        try:
            piece = os.read(mine, 65_536)
        except OSError:  # it has left
            break
        if not piece:
            break
        text += piece
    os.close(mine)
    trains.communicate(timeout=60)
    assert trains.returncode == 0
    assert watches.wait(timeout=60) == 0
    seen = text.decode()
    assert "\x1b[?25l" in seen  # live: the cursor is hidden while it is
    assert "\x1b[?25h" in seen
    assert "30 of 30" in seen
    # After the live table: the table of the comparison, styled and wrapped at the terminal's width.
    final = " ".join(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.rpartition("\x1b[?25h")[2]).split())
    assert re.search(r"method accuracy % .* local \d+\.\d\d .* fedavg \d+\.\d\d ", final)
    assert "> local: clients better than under local" in final
