"""Labels: who means something else by the classes, and who only holds other classes."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedattune
from fedattune import Federation
from fedattune.core.params import Params
from fedattune.core.task import Task
from fedattune.training.uploads import screening
from fedattune.training.uploads.labels import (
    LARGEST_CREDIT,
    MAX_EVIDENCE,
    LabelCheck,
    find_last_layers,
    score_labels,
    split_rows,
)

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.fixture(scope="module")
def digits() -> Federation:
    return fedattune.load_federation("digits", partition="dirichlet", clients=20)


def make_updates(holdings: list[dict[int, int]], seed: int = 0) -> Tensor:
    """Make one step's updates of a head of four classes: client -> {class of a sample: the label it gives}.

    All features share a direction and each class has one of its own; the model still gives each class a quarter.
    """
    rng = torch.Generator().manual_seed(seed)
    features = 2 * torch.ones(4, 8) + 1.5 * torch.eye(4).repeat_interleave(2, dim=1)
    updates = torch.zeros(len(holdings), 4, 8)
    for client, labels in enumerate(holdings):
        for true, said in labels.items():
            error = torch.eye(4)[said] - 0.25
            noisy = features[true] + 0.1 * torch.randn(8, generator=rng)
            updates[client] += error[:, None] * noisy
    return updates


HONEST = [{0: 0, 1: 1}, {1: 1, 2: 2}, {2: 2, 3: 3}, {3: 3, 0: 0}] * 3
ATTACKER = {0: 3, 1: 2}


def test_rows_are_split_into_what_is_held_and_what_it_looks_like() -> None:
    """Both classes share the features (1, 1, 0), so prototypes are orthogonal to them."""
    features = torch.tensor([[1.0, 1.0, 0.5], [1.0, 1.0, -0.5]])
    # Client 0 holds class 0 and client 1 class 1, both with a model that says one half.
    updates = torch.stack([torch.tensor([[0.5], [-0.5]]) * features[0], torch.tensor([[-0.5], [0.5]]) * features[1]])
    held, rest = split_rows(updates)
    # The rows' products are 2.25 (same client) and -1.75 (other), so the first singular vector is (1, 1, 0) / sqrt 2.
    assert held == pytest.approx(torch.tensor([[0.5**0.5, 0], [0, 0.5**0.5]]), abs=1e-6)
    expected = torch.tensor([[[0, 0, 0.25], [0, 0, -0.25]], [[0, 0, 0.25], [0, 0, -0.25]]])
    assert rest == pytest.approx(expected, abs=1e-6)


def test_an_attacker_is_far_below_zero_and_spoils_nobody() -> None:
    scores = score_labels(make_updates([*HONEST, ATTACKER, ATTACKER]))
    assert scores is not None
    assert float(scores[:12].min()) > 0.5
    assert float(scores[12:].max()) < -1


def test_clients_that_mean_nothing_alike_are_not_scored() -> None:
    rng = np.random.default_rng(0)
    own = [dict(enumerate(rng.permutation(4).tolist())) for _ in range(16)]
    assert score_labels(make_updates(own)) is None


CHECK = LabelCheck(["head.weight"])


def check(
    rounds: int, holdings: list[dict[int, int]], found: dict[int, float] | None = None
) -> tuple[dict[int, float], list[int]]:
    found, refused = found or {}, []
    for r in range(rounds):
        updates = make_updates(holdings, r)
        sent = Params({"head.weight": torch.zeros(1, 4, 8).expand_as(updates)})
        refused = CHECK(found, torch.arange(len(holdings)), sent, Params({"head.weight": updates}), ())
    return found, refused


def test_a_round_is_forgiven_and_several_are_not() -> None:
    holdings = [*HONEST, ATTACKER]
    assert check(1, holdings)[1] == []
    found, refused = check(4, holdings)
    assert refused == [12]
    assert found[12] >= MAX_EVIDENCE
    assert max(found[client] for client in range(12)) < 0
    # Who was honest for long has credit, though not without limit.
    turned, refused = check(3, holdings, check(30, [*HONEST, HONEST[0]])[0])
    assert refused == []
    assert turned[12] > -LARGEST_CREDIT
    assert check(10, holdings, turned)[1] == [12]


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("fedavg", {}, ["3.weight"]),
        ("fedper", {}, ["3.weight"]),  # its body has ten rows, too, and is uploaded; its head is not
        ("fedrod", {}, ["head.weight", "personal_head.weight"]),
        ("fedlc", {}, ["model.3.weight"]),
        ("knn_per", {"memory": 10}, ["head.weight"]),  # its memory has ten rows, too
        ("feddbe", {}, ["head.weight"]),
        ("fedam", {"hidden": 50}, ["global_head.weight", "head.weight"]),  # its attention has ten rows
        ("fedcp", {}, ["global_head.weight", "head.weight"]),
    ],
)
def test_the_last_layer_is_the_head(
    method: str, options: dict[str, Any], expected: list[str], digits: Federation
) -> None:
    seen: list[list[str]] = []

    def find(task: Task, n_classes: int) -> list[str]:
        seen.append(find_last_layers(task, n_classes))
        assert find_last_layers(task, 0) == find_last_layers(task, 7) == []
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(screening, "find_last_layers", find)
        hidden = {"hidden": 10}
        fedattune.fit(digits, method, "dnn", rounds=1, screening="on", options=options, model_options=hidden)
    assert seen == [expected]


SCREENINGS = ["auto", "on", "groups", "off"]


@pytest.mark.parametrize(
    ("method", "attack", "active"),
    [
        ("fedavg", None, ["on"]),
        ("fedavg", "label_flip", ["on"]),
        ("igfl_s", "label_flip", ["on"]),
        ("pfedla", "label_flip", ["on"]),
        ("fedmcsa", "label_flip", []),
    ],
)
def test_when_labels_are_compared(
    method: str, attack: str | None, active: list[str], digits: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(screening, "LabelCheck", lambda layers: made.append(layers) or LabelCheck(layers))
    for how in SCREENINGS:
        made.clear()
        fedattune.fit(digits, method, "mlr", rounds=1, screening=how, attack=attack)
        assert bool(made) is (how in active)


@pytest.mark.parametrize("attack", ["label_flip", "label_shift", "label_flip_count"])
def test_attackers_cost_one_model_nothing(attack: str, digits: Federation) -> None:
    """Without this rule, FedAvg loses 7 points to flipped labels and 28 with a false count."""
    more: dict[str, Any] = {"rounds": 25, "lr": 0.05, "eval_every": 25, "screening": "on", "accept": "always"}
    attacked = fedattune.fit(digits, "fedavg", "dnn", attack=attack, attackers=4, **more)
    honest = fedattune.fit(digits, "fedavg", "dnn", **more)
    ids = {client.id for client in attacked.clients}
    values = [getattr(c, honest.evaluation_point) for c in honest.clients if c.id in ids]
    assert attacked.metrics["acc_uniform"] > np.mean(values) - 0.02
    refused = {digits.names[client] for _, client, _ in attacked.store.faults()}
    assert len(refused - ids) == 4
    assert refused.isdisjoint(ids)


@pytest.mark.parametrize("method", ["pfedla", "heurpfedla"])
def test_who_is_set_apart_shares_with_nobody(method: str, digits: Federation) -> None:
    """So a group of honest clients with labels of their own, who cannot be told from attackers, loses nothing."""
    attacked: dict[str, Any] = {"attack": "label_flip", "attackers": 4, "screening": "on", "accept": "always"}
    run = fedattune.fit(digits, method, "dnn", rounds=12, lr=0.05, **attacked)
    apart = run.reports["screening"]["quarantined"]
    assert set(apart) == set(run.facts["attack"]["attackers"].values())
    assert not run.store.faults()  # their uploads are stored: they are what these clients receive
    assert any("quarantined" in note for note in run.notes)
    for matrix in run.mixing.last().values():
        for name in apart:
            one = digits.names.index(name)
            alone = torch.eye(20)[one].numpy()
            assert matrix[one] == pytest.approx(alone)
            assert matrix[:, one] == pytest.approx(alone)
    honest = fedattune.fit(digits, method, "dnn", rounds=12, lr=0.05, screening="on")
    ids = {client.id for client in run.clients}
    values = [getattr(c, honest.evaluation_point) for c in honest.clients if c.id in ids]
    assert run.metrics["acc_uniform"] > np.mean(values) - 0.03


@pytest.mark.parametrize(("partition", "model"), [("dirichlet", "dnn"), ("two_class", "dnn"), ("iid", "mlr")])
def test_honest_clients_are_not_refused(partition: str, model: str) -> None:
    data = fedattune.load_federation("digits", partition=partition, clients=20)
    run = fedattune.fit(data, "fedavg", model, rounds=25, lr=0.05, eval_every=25, screening="on")
    assert not run.store.faults()


@pytest.mark.parametrize("method", ["fedavg", "pfedla"])
def test_a_resumed_run_does_as_the_whole_run_does(method: str, digits: Federation, tmp_path: Any) -> None:
    more: dict[str, Any] = {"rounds": 9, "lr": 0.05, "attack": "label_flip", "attackers": 4, "screening": "on"}
    whole = fedattune.fit(digits, method, "dnn", **more)
    seen = iter([False] * 5 + [True])
    fedattune.fit(
        digits, method, "dnn", out=tmp_path / "run", callbacks=[fedattune.OnRound(lambda _: next(seen))], **more
    )
    resumed = fedattune.fit(digits, method, "dnn", out=tmp_path / "run", resume=True, **more)
    assert resumed.store.faults() == whole.store.faults()
    assert resumed.reports == whole.reports
    assert resumed.store.faults() or resumed.reports["screening"]["quarantined"]
    assert resumed.metrics == whole.metrics
