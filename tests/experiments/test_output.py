"""Results take no input's place, and go where they are sent."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_helpers import Done, files, hospital_rows, refused, write_csv

Cli = Callable[..., Done]
FAST = ("--rounds", 1, "--steps", 2, "--clients", 5, "--quiet")
TABLE = ("--data", "p.csv", "--client-column", "hospital", "--target", "outcome")


@pytest.mark.parametrize("out", ["o", "empty"])
def test_no_half_made_run(cli: Cli, work: Path, out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "empty").mkdir()
    before = files(work.parent)

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("fedattune.data.manifest.save_manifest", full)
        refused(cli("run", *FAST, "--out", out, "--save-partition", "s.json"), "No space left")
    assert files(work.parent) == before
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        refused(cli("run", *FAST, "--out", out), "No space left")
    assert files(work.parent) == before


def test_a_folder_that_cannot_be_made(cli: Cli, work: Path) -> None:
    (work / "h.csv").write_text("x")
    before = files(work.parent)
    refused(cli("run", *FAST, "--out", "h.csv/x", "--save-partition", "s.json"), "h.csv is a file, in which")
    refused(cli("run", *FAST, "--out", "h.csv/x/y"), "h.csv is a file, in which")
    assert files(work.parent) == before


def test_inputs_are_not_written_over(cli: Cli, work: Path) -> None:
    write_csv(work / "p.csv", hospital_rows(3))
    (work / "e.yaml").write_text("rounds: 1\n")
    (work / "link.json").symlink_to("p.csv")
    os.link(work / "p.csv", work / "hard.json")
    assert cli("data", "show", *TABLE, "--save-partition", "s.json").code == 0
    before = {path: Path(path).read_bytes() for path in files(work) if Path(path).is_file()}
    for name in ("p.csv", "../work/p.csv", "link.json", "hard.json"):
        refused(cli("compare", *TABLE, "--json", name), "this is the data, which would be overwritten")
    refused(cli("compare", "--config", "e.yaml", "--json", "e.yaml"), "this is the configuration")
    refused(cli("compare", *TABLE, "--partition", "s.json", "--json", "s.json"), "this is the partition")
    refused(cli("data", "show", "--save-partition", "n.json", "--json", "n.json"), "partition to be saved")
    refused(cli("data", "show", "--json", "n.png", "--picture", "n.png"), "this is the file of --json")
    (work / "e.png").write_text("clients: 5\n")
    refused(cli("data", "show", "--config", "e.png", "--picture", "e.png"), "this is the configuration")
    (work / "e.png").unlink()
    assert {path: Path(path).read_bytes() for path in files(work) if Path(path).is_file()} == before
    assert cli("run", *FAST, "--out", "o").code == 0
    for name in ("experiment.yaml", "partition.json", "command.txt"):
        refused(cli("run", "--resume", "o", "--json", f"o/{name}"), f"{name}: this is a file of the run in")


def test_files_of_another_kind_are_not_written_over(cli: Cli, work: Path, comparison: Path) -> None:
    for name in ("other.csv", "thesis.tex", "OLD.JSON"):
        (work / name).write_text("mine")
    (work / "link.json").symlink_to("other.csv")
    (work / "new").touch()  # as mktemp makes it
    before = {path: Path(path).read_bytes() for path in files(work) if Path(path).is_file()}
    for command in (
        ("compare", *FAST, "--json"),
        ("data", "show", "--json"),
        ("data", "show", "--schema"),
        ("doctor", "--quick", "--json"),
        ("explain", comparison, "--json"),
    ):
        for name in ("other.csv", "link.json"):
            ending = ".yaml" if command[-1] == "--schema" else ".json"
            refused(
                cli(*command, name), f"{command[-1]} {name}: this file exists, and is no {ending} file; give another"
            )
    refused(cli("report", comparison, "--out", "other.csv"), "this file exists, and is no .html file")
    refused(cli("watch", comparison, "--once", "--out", "other.csv"), "this file exists, and is no .html file")
    refused(cli("table", comparison, "--format", "csv", "--out", "thesis.tex"), "this file exists, and is no .csv file")
    assert {path: Path(path).read_bytes() for path in files(work) if Path(path).is_file()} == before
    for name in ("OLD.JSON", "new"):
        assert cli("data", "show", "--json", name).code == 0
        assert json.loads((work / name).read_text())["data"] == "digits"
    for _ in range(2):  # a schema may be JSON, too
        assert cli("data", "show", "--schema", "schema.json").code == 0
    assert cli("table", comparison, "--out", "other.csv").code == 0
    assert (work / "other.csv").read_text().startswith("method,")


def test_devices(cli: Cli, process: Cli, work: Path) -> None:
    assert cli("data", "show", "--json", "/dev/null").code == 0
    assert not Path("/dev/null").is_file()
    done = process("data", "show", "--json", "/dev/stdout")
    assert done.code == 0, done.err
    content, end = json.JSONDecoder().raw_decode(done.out)
    assert content["data"] == "digits"
    assert "partition hash" in done.out[end:]


def test_standard_output_that_is_a_file(process: Cli, work: Path) -> None:
    import subprocess
    import sys

    from cli_helpers import environment

    with (work / "all.txt").open("w") as file:
        line = [sys.executable, "-m", "fedattune", "data", "show", "--json", "/dev/stdout"]
        subprocess.run(line, stdout=file, env=environment(), cwd=work, check=True, timeout=120)
    text = (work / "all.txt").read_text()
    assert json.JSONDecoder().raw_decode(text)[0]["data"] == "digits"
    assert "partition hash" in text


def test_a_file_called_like_a_data_set(cli: Cli, work: Path) -> None:
    (work / "digits").write_text("not a table")
    assert cli("run", *FAST, "--out", "o").code == 0
    assert "data: digits\n" in (work / "o" / "experiment.yaml").read_text()
    assert cli("run", "--resume", "o", "--quiet").code == 0
    # It is no input, and no JSON file either.
    refused(cli("data", "show", "--data", "digits", "--json", "digits"), "this file exists, and is no .json file")
    assert (work / "digits").read_text() == "not a table"


def test_rounds_to_an_accuracy(cli: Cli, work: Path) -> None:
    """A mean test accuracy of 1% is there at the first evaluation, one of 100% never with one round."""
    compare = ("compare", *FAST, "--algorithms", "fedavg", "--out", "o")
    done = cli(*compare, "--rounds-to", 0.01, "--json", "r.json")
    assert done.code == 0, done.err
    assert " rounds to 1%" in done.out
    content = json.loads((work / "r.json").read_text())
    assert [run["rounds_to"] for run in content["runs"]] == [{"accuracy": 0.01, "round": 1}] * 2
    assert [row["rounds_to"] for row in content["table"]] == [[1], [1], None]
    assert "rounds to 1%" in (work / "o" / "report.html").read_text()
    other = cli("compare", "--resume", "o", "--rounds-to", 1, "--quiet", "--json", "r.json")
    assert other.code == 0, other.err
    assert " rounds to 100%" in other.out
    assert " never" in other.out
    assert "note: rounds_to" not in other.out  # it changes no number
    assert json.loads((work / "r.json").read_text())["runs"][0]["rounds_to"] == {"accuracy": 1, "round": None}
    plain = cli("compare", *FAST, "--algorithms", "fedavg", "--out", "p", "--json", "r.json")
    assert "rounds to" not in plain.out
    assert "rounds_to" not in json.loads((work / "r.json").read_text())["runs"][0]


def test_no_command_writes_over_a_file_of_a_run(cli: Cli, work: Path) -> None:
    assert cli("compare", *FAST, "--algorithms", "fedavg", "--out", "o").code == 0
    before = {path: Path(path).read_bytes() for path in files(work) if Path(path).is_file()}
    run = "o/fedavg/seed-0"
    (work / "link").symlink_to(f"{run}/config.json")
    targets = [
        f"{run}/{name}" for name in ("metrics.sqlite", "result.json", "models.safetensors", "checkpoints/x", "rows/x")
    ]
    (work / run / "rows").mkdir()
    targets += ["o/experiment.yaml", "o/result.json", "o/SHA256SUMS", "o/baselines/x.json", "link"]
    commands = ["report o -o", "explain o --json", "watch o --once -o", "table o -o", "doctor --quick --json"]
    commands += ["data show --json", "data show --schema"]
    for target in targets:
        for words in commands:
            done = cli(*words.split(), target)
            assert done.code == 2, (words, target)
            assert "this is a file of the run in" in done.err or "of the run, which would be" in done.err, (
                words,
                target,
            )
    refused(cli("export", "o", "--client", "0", "--out", f"{run}/models.safetensors"), "this is a file of the run in")
    refused(cli("compare", "--resume", "o", "--json", "o/result.json"), "this is a file of the run in")
    (work / "link").unlink()
    assert {path: Path(path).read_bytes() for path in before} == before
    assert cli("report", "o", "-o", "o/page.html").code == 0


def test_a_file_in_the_place_of_a_run_folder(cli: Cli, work: Path, comparison: Path) -> None:
    (work / "notes.txt").write_text("mine")
    for name in ("notes.txt", next(comparison.rglob("config.json"))):
        for command in (["report"], ["table"], ["plot"], ["explain"], ["watch", "--once"], ["export", "--client", "0"]):
            refused(cli(*command, name), f"{name} is a file, expected a folder; give the one that fedattune run or")
