"""Many clients: rows on disk are those in memory, survive a crash, and nothing grows with those not asked."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fedattune
from fedattune import ConfigError, Federation, Result, RunError
from federations import many

pytestmark = pytest.mark.usefixtures("unmeasured")

RUN = {"rounds": 3, "steps": 2, "cohort": 3, "lr": 0.1}


def numbers(result: Result) -> list[dict[str, Any]]:
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in result.history]


def same(a: Result, b: Result) -> None:
    assert numbers(a) == numbers(b)
    n = len(a.clients)
    for client in (0, n - 1):
        left, right = a.model(client).state_dict(), b.model(client).state_dict()
        assert all(torch.equal(v, right[k]) for k, v in left.items())


@pytest.mark.parametrize(
    "name", ["fedmcsa", "pfedme", "ditto", "scaffold", "igfl", "fedper", "fedrod", "igfl_s", "heurfedamp", "pfedla"]
)
def test_memory_and_disk_give_the_same_numbers(name: str, ragged: Federation, tmp_path: Path):
    memory = fedattune.fit(ragged, name, client_state="memory", **RUN)
    disk = fedattune.fit(ragged, name, client_state="disk", out=tmp_path / "run", **RUN)
    same(memory, disk)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("ditto", "disk", "disk"), ("fedmcsa", "disk", "memory"), ("fedmcsa", "memory", "disk")],
)
def test_a_stopped_run_goes_on_wherever_its_rows_are(
    name: str, before: str, after: str, ragged: Federation, tmp_path: Path
):
    whole = fedattune.fit(ragged, name, client_state="memory", **RUN)
    out = tmp_path / "run"
    assert not fedattune.fit(
        ragged, name, client_state=before, out=out, callbacks=[fedattune.OnRound(lambda _: True)], **RUN
    ).is_finished
    same(whole, fedattune.fit(ragged, name, client_state=after, out=out, resume=True, **RUN))


class Largest(TorchDispatchMode):
    """The most values of a floating-point tensor that any operation makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(made, torch.Tensor) and made.is_floating_point():
                self.most = max(self.most, made.untyped_storage().nbytes() // made.element_size())
        return out


@pytest.mark.parametrize("name", ["ditto", "fedmcsa"])
def test_nothing_grows_with_clients_that_are_not_asked(name: str, monkeypatch: pytest.MonkeyPatch):
    n, row = 100_000, 18
    touched = {"read": 0, "write": 0}
    from fedattune.runs.rows import SlotFile

    for what in touched:
        real = getattr(SlotFile, what)

        def counted(self: SlotFile, which: Any, *rest: Any, what: str = what, real: Any = real) -> Any:
            touched[what] += len(which)
            return real(self, which, *rest)

        monkeypatch.setattr(SlotFile, what, counted)
    with Largest() as largest:
        result = fedattune.fit(
            many(n), name, client_state="disk", train="cohort", rounds=2, steps=2, cohort=10, eval_clients=20
        )
    assert largest.most <= n < n * row  # flags and weights of all clients, and no row
    assert touched["write"] <= 2 * 10 * 3  # memory, bank, mailbox
    assert touched["read"] <= 400
    assert len(result.clients) == 20
    assert result.n_clients == n


def test_what_is_evaluated_is_drawn_once_and_said(ragged: Federation):
    some = [fedattune.fit(ragged, name, eval_clients=2, **RUN, seed=s) for name, s in (("fedavg", 0), ("ditto", 1))]
    assert [c.id for c in some[0].clients] == [c.id for c in some[1].clients]
    assert "numbers are of 2 of the 6 clients, drawn once for all methods (--eval-clients)" in some[0].notes
    whole = fedattune.fit(ragged, "fedavg", **RUN)
    of = {c.id: c for c in whole.clients}
    assert all(of[c.id] == c for c in some[0].clients)
    assert whole.local_steps == some[0].local_steps
    assert some[0].mixing.last()["model"].shape == (6, 6)
    other = next(iter(of.keys() - {c.id for c in some[0].clients}))
    with pytest.raises(RunError, match=r"2 of its 6 clients were evaluated"):
        some[0].model(other)
    assert some[0].model(some[0].clients[1].id) is not None


def test_of_very_many_a_thousand_are_evaluated():
    result = fedattune.fit(many(10_001), "fedavg", **RUN)
    assert len(result.clients) == 1000
    assert any("1,000 of the 10,001 clients" in note and "default" in note for note in result.notes)
    with pytest.raises(RunError, match="too large"):
        result.mixing.last()
    assert result.mixing.among(3).weights["model"].shape == (3, 3)


def test_large_stacks_are_evaluated_and_trained_in_turns(ragged: Federation, monkeypatch: pytest.MonkeyPatch):
    from fedattune.training.backends import local as site
    from fedattune.training.clients import evaluation

    made = {name: fedattune.fit(ragged, name, **RUN) for name in ("fedmcsa", "pfedme", "fedavg_ft", "fedavg")}
    for module, limit in ((evaluation, "MODEL_CHUNK_BYTES"), (site, "REQUEST_CHUNK_BYTES")):
        monkeypatch.setattr(module, limit, 2 * 18 * 4)
    for name, whole in made.items():
        parts = fedattune.fit(ragged, name, dtype="float32", **RUN)
        for a, b in zip(whole.clients, parts.clients, strict=True):
            assert (a.received, a.trained) == pytest.approx((b.received, b.trained), abs=0.08)
        assert (parts.bytes_up, parts.bytes_down, parts.local_steps) == (
            whole.bytes_up,
            whole.bytes_down,
            whole.local_steps,
        )


@pytest.mark.parametrize("name", ["fedmcsa", "ditto"])
def test_clients_join_a_run_whose_rows_are_on_disk(name: str, tmp_path: Path):
    memory, disk = (
        fedattune.fit(many(12), name, client_state=where, held_out=3, out=tmp_path / where, **RUN)
        for where in ("memory", "disk")
    )
    assert memory.newcomers == disk.newcomers
    new = many(4)
    assert (
        fedattune.personalize(memory, new, rounds=1).newcomers == fedattune.personalize(disk, new, rounds=1).newcomers
    )
    again = fedattune.personalize(Result.load(tmp_path / "disk"), new, rounds=1)
    assert again.newcomers == fedattune.personalize(memory, new, rounds=1).newcomers


def test_that_clients_cannot_join_is_said_before_training(monkeypatch: pytest.MonkeyPatch):
    from fedattune.runs import rows as rooms

    monkeypatch.setattr(rooms, "NEWCOMER_MEMORY_BYTES", 8 * 18 * 4)
    asked: list[Any] = []
    with pytest.raises(ConfigError, match=r"of the models of 9 clients.*leave held_out at 0"):
        fedattune.fit(
            many(12),
            "fedmcsa",
            client_state="disk",
            held_out=3,
            callbacks=[fedattune.OnRound(asked.append)],
            dtype="float32",
            **RUN,
        )
    assert not asked
    result = fedattune.fit(many(9), "fedmcsa", client_state="disk", dtype="float32", **RUN)
    with pytest.raises(ConfigError, match="clients cannot join after training"):
        fedattune.personalize(result, many(3), rounds=1)
    assert fedattune.fit(many(12), "ditto", client_state="disk", held_out=3, **RUN).newcomers
