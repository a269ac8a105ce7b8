"""A run's store is read while another process writes it: nothing is lost, nobody fails, nothing half-done is seen."""

import multiprocessing
import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import fedattune
from fedattune import Federation, RunError
from fedattune.analysis.load import read_run
from fedattune.core.payload import MixingMatrices
from fedattune.engine.base import Scores
from fedattune.runs import store
from fedattune.runs.store import RoundRecord, RunStore
from fedattune.training import loop as rounds

ROUNDS, CLIENTS = 250, 30


def fill(kept: RunStore, r: int) -> None:
    everybody = torch.arange(CLIENTS)
    n = torch.full((CLIENTS,), 10)
    for point in ("received", "trained"):
        kept.add_scores(r, point, "test", Scores(n, everybody % 11, torch.zeros(CLIENTS)))
    kept.add_mixing(r, MixingMatrices(everybody, everybody, {"w": torch.full((CLIENTS, CLIENTS), float(r))}))
    kept.add_round(RoundRecord(r, float(r), r, r, r, [], []))


def write(path: Path) -> None:
    """Commit a round every few milliseconds."""
    kept = RunStore(path)
    for r in range(1, ROUNDS + 1):
        fill(kept, r)
        kept.commit()
        time.sleep(0.002)


def begin(path: Path, what: Any = write) -> Any:
    writer = multiprocessing.get_context("fork").Process(target=what, args=(path,))
    writer.start()
    return writer


def consistent(kept: RunStore) -> int:
    """All of every round or nothing of it; the last one."""
    known = [record.round for record in kept.rounds()]
    assert known == list(range(1, len(known) + 1))
    assert [r for r, point, _ in kept.scores("test") if point == "received"] == known
    assert [r for r, point, _ in kept.scores("test") if point == "trained"] == known
    assert list(kept.mixing(CLIENTS)) == known
    return len(known)


def test_a_writer_that_commits_all_the_time_and_readers_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sqlite"
    RunStore(path).close()
    writer = begin(path)
    seen: list[int] = []
    while writer.is_alive():
        with closing(RunStore.load_copy(path)) as copy:
            seen.append(consistent(copy))
        with closing(RunStore.open_read_only(path)) as beside:
            last = beside.rounds()[-1:]
            assert not last or last[0].round >= seen[-1]
            if last and last[0].round > 1:
                assert beside.rounds(last[0].round)[0].round == last[0].round
                assert min(r for r, *_ in beside.scores("test", last[0].round)) == last[0].round
    writer.join()
    assert writer.exitcode == 0
    assert seen == sorted(seen)
    assert len(set(seen)) > 5
    with closing(RunStore.load_copy(path)) as copy:
        assert consistent(copy) == ROUNDS


def spill_and_die(path: Path) -> None:
    kept = RunStore(path)
    fill(kept, 1)
    kept.commit()
    kept._db.execute("PRAGMA cache_size=5")  # so that half a commit is on the disk
    kept._db.execute("UPDATE evaluations SET scores = zeroblob(5000)")
    for r in range(2, 100):
        fill(kept, r)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("way", [RunStore.load_copy, RunStore.open_read_only])
def test_of_a_writer_killed_in_the_middle_all_that_was_committed_is_read(way: Any, tmp_path: Path) -> None:
    path = tmp_path / "metrics.sqlite"
    writer = begin(path, spill_and_die)
    writer.join()
    assert (tmp_path / "metrics.sqlite-journal").stat().st_size
    with closing(way(path)) as kept:
        assert consistent(kept) == 1
        ((n, correct, _),) = (scores for _, point, scores in kept.scores("test") if point == "trained")
        assert (correct / n).mean() > 0.4  # not what the half commit made of it
        assert list(kept.scores("test", 2)) == []


def test_a_reader_that_never_ends_is_said_and_the_writer_goes_on_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "READER_TIMEOUT_S", 0.2)
    path = tmp_path / "metrics.sqlite"
    kept = RunStore(path)
    fill(kept, 1)
    kept.commit()
    reader = RunStore.open_read_only(path)
    halted = reader._db.execute("SELECT * FROM evaluations")
    halted.fetchone()
    fill(kept, 2)
    with pytest.raises(RunError, match="database is locked; check that the disk has space and that no halted"):
        kept.commit()
    halted.close()
    kept.commit()
    assert consistent(reader) == 2


RUN = {"rounds": 8, "cohort": 3, "steps": 2, "batch_size": 8, "lr": 0.1}


def strip(result: fedattune.Result) -> list[dict[str, Any]]:
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in result.history]


def test_rounds_are_seen_before_a_checkpoint_and_computed_again_after_a_kill(
    ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Committed earlier than checkpoints, a run that is killed still gives the same numbers, each round once."""
    whole = fedattune.fit(ragged, "fedmcsa", **RUN)
    monkeypatch.setattr(rounds, "COMMIT_AFTER_S", 0.0)
    monkeypatch.setattr(rounds, "CHECKPOINT_SHARE", 1e-9)  # the first checkpoint is due at once, no other
    out, seen = tmp_path / "run", []

    def killed(progress: fedattune.Progress) -> None:
        found = read_run(out)
        seen.append(found.rounds if found else 0)
        if progress.round == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedattune.fit(ragged, "fedmcsa", out=out, callbacks=[fedattune.OnRound(killed)], **RUN)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert [path.stem for path in (out / "checkpoints").iterdir()] == ["000001"]
    half = read_run(out)
    assert half is not None
    assert half.bytes_up == sum(half.store.traffic()["up"].values())
    resumed = fedattune.fit(ragged, "fedmcsa", out=out, resume=True, **RUN)
    assert strip(resumed) == strip(whole)
    assert [record.round for record in resumed.store.rounds()] == list(range(1, 9))
    assert list(resumed.mixing) == list(whole.mixing)


def filled(path: Path, n: int = 3) -> RunStore:
    kept = RunStore(path)
    for r in range(1, n + 1):
        fill(kept, r)
    kept.commit()
    return kept


def test_a_full_disk_is_no_damaged_store(tmp_path: Path) -> None:
    kept = filled(tmp_path / "metrics.sqlite")
    pages = kept._db.execute("PRAGMA page_count").fetchone()[0]
    kept._db.execute(f"PRAGMA max_page_count={pages}")
    kept._db.execute("PRAGMA cache_size=5")

    def write_on() -> None:
        for r in range(4, 400):
            fill(kept, r)
            kept.commit()

    said = r"metrics\.sqlite: the disk is full; free some space, then continue with --resume"
    with pytest.raises(RunError, match=said):
        write_on()
    kept.close()
    with closing(RunStore.load_copy(tmp_path / "metrics.sqlite")) as copy:
        assert consistent(copy) >= 3  # no finished round is lost


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE rounds SET absent = x'00'",
        "UPDATE evaluations SET scores = 'x'",
        "UPDATE evaluations SET scores = zeroblob(9)",
        "UPDATE mixing SET weights = (SELECT scores FROM evaluations)",
        "DROP TABLE rounds",
    ],
)
def test_a_damaged_store_is_one_sentence(change: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.sqlite"
    kept = filled(path)
    kept._db.execute(change)
    kept._db.commit()
    kept.close()

    def read_all() -> None:
        with closing(RunStore.open_read_only(path)) as store:
            assert [*store.rounds(), *store.scores("test"), store.mixing(CLIENTS).last(), store.traffic()]

    with pytest.raises(RunError, match=r"cannot read .*metrics\.sqlite: it is damaged "):
        read_all()
