"""Closed forms of learned mixing, HeurpFedLA and pFedHN (specification 10 C1 to C10), worked out in each test."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedattune
from fedattune import Federation, Params, Payload, Result
from fedattune.algorithms.pfedhn import PFedHNServer, generate_models
from fedattune.algorithms.pfedla import HeurPFedLAServer, PFedLAServer
from fedattune.core.selectors import group_names

N = 4
IDS = torch.tensor([0, 2])
SHAPES = {"body.weight": (4, 3), "body.bias": (4,), "norm.weight": (4,), "head.weight": (2, 4)}
LAYERS = ["body", "norm", "head"]
RUN: dict[str, Any] = {"rounds": 4, "steps": 2, "batch_size": 16, "lr": 0.1, "dtype": "float64"}


def draw(n: int, seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return Params({k: torch.randn(n, *s, generator=generator, dtype=torch.float64) for k, s in SHAPES.items()})


def bank(rule: PFedLAServer, theta: Params, heads: float = 0.3) -> Any:
    """A state whose clients uploaded theta and whose hypernetworks have heads that are not zero."""
    torch.manual_seed(0)
    state = rule.init(theta.rows(0), N)
    networks = state["hypernetworks"]
    assert isinstance(networks, Params)
    for k in ("head.weight", "head.bias"):
        networks[k] = networks[k] + heads * torch.randn(networks[k].shape, dtype=torch.float64)
    return {**state, "theta": theta.map(torch.clone)}


def learned(**more: Any) -> PFedLAServer:
    """By the paper's step, unless it is told otherwise."""
    return PFedLAServer(**{"hn_step": "gradient", "embedding": 3, "hidden": 5} | more)


def retained(**more: Any) -> HeurPFedLAServer:
    return HeurPFedLAServer(hn_step="gradient", embedding=3, hidden=5, **more)


def step(rule: PFedLAServer, state: Any, received: Params, ids: Tensor = IDS) -> Any:
    """The state after clients `ids` uploaded this, and the hypernetworks before."""
    sent = rule.broadcast(state, ids).payload
    before = state["hypernetworks"].map(torch.clone)
    n = torch.ones(len(ids), dtype=torch.int64)
    return rule.aggregate(state, ids, sent, Payload(received), n), before


def by_networks(rule: PFedLAServer, state: Any, G: Params, ids: Tensor = IDS) -> Params:
    """The gradient that a step of rate 1 follows when G is that of the loss by the models sent."""
    networks = state["hypernetworks"].map(torch.clone)
    copy = {**state, "hypernetworks": networks}
    sent = rule.broadcast(state, ids).payload
    replace(rule, hn_lr=1.0).learn(copy, ids, sent.params, sent.params - G)
    return (state["hypernetworks"] - networks).rows(ids)


def fit(name: str, federation: Federation, **settings: Any) -> Result:
    return fedattune.fit(federation, name, "dnn", model_options={"hidden": 4}, **(RUN | settings))


@pytest.mark.parametrize("norm", ["softmax", "relu_sum"])
def test_c1_rows_sum_to_one(norm: str) -> None:
    rule = learned(norm=norm)
    _, columns, weights = rule.broadcast(bank(rule, draw(N, 1), 5.0), IDS).mixing
    assert columns.tolist() == [0, 1, 2, 3]
    assert list(weights) == LAYERS
    for alpha in weights.values():
        assert alpha.shape == (2, N)
        assert (alpha >= 0).all()
        assert torch.allclose(alpha.sum(1), torch.ones(2, dtype=torch.float64), atol=1e-12)
    assert (weights["body"] - weights["head"]).abs().max() > 1e-3  # rows of their own for every layer


def test_c1_by_sums_it_starts_from_uneven_weights() -> None:
    """Heads from U(0, 1): weights differ from 1 / N at the start, where softmax has 1 / N."""
    for norm, uneven in (("relu_sum", True), ("softmax", False)):
        rule = learned(norm=norm)
        weights = rule.broadcast(bank(rule, draw(N, 1), 0.0), IDS).mixing.weights["body"]
        assert ((weights - 1 / N).abs().max() > 1e-2) == uneven


def closed_form(state: Any, rule: PFedLAServer, received: Params) -> Tensor:
    """dz^l[k] = alpha^l[k] <theta_k,l - theta_bar_l, G_l> with G = theta_bar - what came back; (R, L, K)."""
    theta, sent = state["theta"], rule.broadcast(state, IDS).payload.params
    alphas = rule.broadcast(state, IDS).mixing.weights
    out = torch.zeros(2, len(LAYERS), N, dtype=torch.float64)
    for i in range(2):
        for layer, (component, names) in enumerate(group_names(theta, "layer").items()):
            for k in range(N):
                inner = sum(((theta[m][k] - sent[m][i]) * (sent[m][i] - received[m][i])).sum() for m in names)
                out[i, layer, k] = alphas[component][i, k] * inner
    return out


def test_c3_gradient_of_the_logits() -> None:
    """The biases of the heads are added to the logits, so their gradient is that of the logits."""
    rule, received = learned(), draw(2, 2)
    state = bank(rule, draw(N, 1))
    expected = closed_form(state, rule, received)
    found = by_networks(rule, state, rule.broadcast(state, IDS).payload.params - received)["head.bias"]
    assert torch.allclose(found, expected, atol=1e-12)
    assert expected.abs().min() > 1e-6
    assert torch.allclose(found.sum(2), torch.zeros(2, 3, dtype=torch.float64), atol=1e-12)
    after, before = step(rule, state, received)
    change = after["hypernetworks"]["head.bias"][IDS] - before["head.bias"][IDS]
    assert torch.allclose(change, -rule.hn_lr * expected, atol=1e-14)


@pytest.mark.parametrize("norm", ["softmax", "relu_sum"])
def test_c3_gradient_of_every_value_by_finite_differences(norm: str) -> None:
    """f_i(theta_bar) = 1/2 ||theta_bar - m_i||^2: with one step of rate 1 clients return m_i, so G is its gradient."""
    rule, m = learned(norm=norm), draw(2, 3)
    state = bank(rule, draw(N, 1))
    gradient = by_networks(rule, state, rule.broadcast(state, IDS).payload.params - m)

    def loss(client: int) -> float:
        off = rule.broadcast(state, IDS).payload.params - m
        return float(sum(0.5 * v[client].square().sum() for v in off.values()))

    checked, generator = 0, torch.Generator().manual_seed(0)
    for k, values in state["hypernetworks"].items():
        for row, client in enumerate(IDS.tolist()):
            flat = values[client].view(-1)
            for j in torch.randint(len(flat), (4,), generator=generator).tolist():
                kept, up_down = flat[j].item(), []
                for change in (1e-6, -1e-6):
                    flat[j] = kept + change
                    up_down.append(loss(row))
                flat[j] = kept
                slope = (up_down[0] - up_down[1]) / 2e-6
                assert gradient[k][row].view(-1)[j].item() == pytest.approx(slope, abs=1e-6), k
                checked += abs(slope) > 1e-3
    assert checked > 10


def test_normalised_logits_by_hand() -> None:
    """Four models 0, 0, 0, 4: the mean is 1, s^2 = (1 + 1 + 1 + 9) / 4 = 3. The mixture 1 came back as 1.5: G = -0.5.

    dz[k] = alpha[k] (theta_k - 1) N G / s^2 = (theta_k - 1) (-0.5 / 3) / 1: 1/6 for the zeros, -1/2 for the 4.
    """
    rule = learned(hn_step="normalised", hn_lr=0.1)
    theta = Params(w=torch.tensor([0.0, 0.0, 0.0, 4.0], dtype=torch.float64)[:, None])
    torch.manual_seed(0)
    state = {**rule.init(theta.rows(0), N), "theta": theta}
    one = torch.tensor([2])
    after, before = step(rule, state, Params(w=torch.tensor([[1.5]], dtype=torch.float64)), one)
    change = after["hypernetworks"]["head.bias"][one] - before["head.bias"][one]
    expected = -0.1 * torch.tensor([1 / 6, 1 / 6, 1 / 6, -1 / 2], dtype=torch.float64)
    assert torch.allclose(change[0, 0], expected, atol=1e-12)


def test_a_normalised_step_is_the_papers_with_the_gradient_divided_by_the_spread() -> None:
    theta, received = draw(N, 1), draw(2, 2)
    rule = learned(hn_step="normalised")
    state = bank(rule, theta)
    G = rule.broadcast(state, IDS).payload.params - received
    squares = {
        name: sum((theta[m] - theta[m].mean(0)).square().sum() / N for m in names)
        for names in group_names(theta, "layer").values()
        for name in names
    }
    divided = Params({k: v * N / squares[k] for k, v in G.items()})
    normalised, plain = by_networks(rule, state, G), by_networks(learned(), state, divided)
    assert all(torch.allclose(normalised[k], plain[k], atol=1e-12) for k in plain)


def test_c7_retained_layers_are_the_clients_own() -> None:
    rule, theta = retained(retain=2), draw(N, 1)
    state = bank(rule, theta)
    flags = torch.stack(list(rule.broadcast(state, IDS).payload.extra["retained"].values()), 1)
    assert flags.sum(1).tolist() == [2, 2]
    # the layers with the largest weight of the own model, which plain learned mixing shows
    plain = learned().broadcast(state, IDS).mixing.weights
    own = torch.stack([alpha[torch.arange(2), IDS] for alpha in plain.values()], 1)
    for i in range(2):
        assert own[i][flags[i]].min() > own[i][~flags[i]].max()
    sent, mixed = rule.broadcast(state, IDS).payload.params, learned().broadcast(state, IDS).payload.params
    gradient = by_networks(rule, state, draw(2, 2))["head.bias"]
    for layer, names in enumerate(group_names(theta, "layer").values()):
        for k in names:
            for i, client in enumerate(IDS.tolist()):
                expected = theta[k][client] if flags[i, layer] else mixed[k][i]
                assert torch.equal(sent[k][i], expected)
                assert (gradient[i, layer].abs().max() == 0) == flags[i, layer]


def test_c7_none_retained_is_pfedla_and_all_is_local(equal: Federation) -> None:
    settings: dict[str, Any] = {"cohort": 4, "rounds": 4}
    fast = {"hn_lr": 1.0}
    none = fit("heurpfedla", equal, options={"retain": 0, **fast}, **settings)
    pfedla = fit("pfedla", equal, options=fast, **settings)
    all_ = fit("heurpfedla", equal, options={"retain": 9, **fast}, **settings)
    local = fit("local", equal, **settings)
    for k in local.models:
        assert torch.equal(none.models[k], pfedla.models[k])
        assert torch.equal(all_.models[k], local.models[k])
    assert (all_.bytes_down, local.bytes_down) == (4 * 4 * 2, 0)  # nothing but a byte per layer that says so
    assert "keeps all of this model's components (2): this is training alone" in all_.notes[0]
    assert not none.notes
    off = fit("heurpfedla", equal, options={"retain": 9, "upload_retained": False}, **settings)
    assert off.bytes_up == 0


def test_c7_retained_layers_need_not_travel() -> None:
    """float64: body has 16 values, norm 4, head 8; a flag is one byte."""
    theta = draw(N, 1)
    sizes = torch.tensor([16, 4, 8])
    for upload in (True, False):
        rule = retained(upload_retained=upload)
        state = bank(rule, theta)
        sent = rule.broadcast(state, IDS).payload
        flags = torch.stack(list(sent.extra["retained"].values()), 1)
        spared = 8 * int((flags * sizes).sum())
        assert rule.bytes_down(state, IDS, sent).total() == 2 * (8 * 28 + 3) - spared
        received = draw(2, 2)
        after, _ = step(rule, state, received)
        assert rule.bytes_up(after, IDS, Payload(received)).total() == 2 * 8 * 28 - (0 if upload else spared)
        for layer, names in enumerate(group_names(theta, "layer").values()):
            for k in names:
                for i, client in enumerate(IDS.tolist()):
                    kept = flags[i, layer] and not upload
                    assert torch.equal(
                        after["theta"][k][client], (theta if kept else received)[k][client if kept else i]
                    )


def test_c8_c9_the_bank_holds_what_came_back_and_nobody_else_changes() -> None:
    rule, theta, received = learned(hn_lr=1.0), draw(N, 1), draw(2, 2)
    after, before = step(rule, bank(rule, theta), received)
    rest = torch.tensor([1, 3])
    for k in theta:
        assert torch.equal(after["theta"][k][IDS], received[k])
        assert torch.equal(after["theta"][k][rest], theta[k][rest])
    for k in before:
        assert torch.equal(after["hypernetworks"][k][rest], before[k][rest])
    assert not torch.equal(after["hypernetworks"]["head.bias"][IDS], before["head.bias"][IDS])


def test_c8_a_client_that_was_never_asked_is_sent_the_plain_mean(ragged: Federation) -> None:
    result = fit("pfedla", ragged, cohort=2, rounds=2, options={"hn_lr": 1.0})
    heuristic = fit("heurpfedla", ragged, cohort=2, rounds=2)
    assert result.trained_server
    assert heuristic.trained_server
    never = (~result.trained_server.state["has_uploaded"]).nonzero().flatten()  # type: ignore[operator]
    assert len(never)
    for k, theta in result.trained_server.state["theta"].items():  # type: ignore[union-attr]
        assert torch.allclose(result.models[k][never], theta.mean(0).expand(len(never), *theta.shape[1:]), atol=1e-14)
    start = heuristic.trained_server.trained_module.get_parameter("1.weight")
    assert torch.equal(heuristic.models["1.weight"][never[0]], start)  # the first layer is retained


def test_newcomers_of_learned_mixing_weigh_all_and_are_weighed_by_nobody() -> None:
    rule, theta = learned(hn_lr=1.0), draw(N, 1)
    state = bank(rule, theta)
    state["has_uploaded"] = torch.tensor([True, True, False, True])
    before = rule.broadcast(state, torch.arange(N)).payload.params
    joined = rule.add_clients(state, 2)
    mean = theta.map(lambda a: a[[0, 1, 3]].mean(0))
    new = torch.tensor([N, N + 1])
    sent = rule.broadcast(joined, new).payload
    weights = rule.broadcast(joined, new).mixing.weights["head"]
    assert torch.allclose(weights[0], torch.tensor([0.2, 0.2, 0.2, 0.2, 0.2, 0.0], dtype=torch.float64))
    for k, v in theta.items():
        assert torch.allclose(joined["theta"][k][N:], mean[k].expand(2, *mean[k].shape))  # type: ignore[index]
        assert torch.allclose(sent.params[k][0], (4 * v.mean(0) + mean[k]) / 5)
    after = rule.aggregate_newcomers(joined, new, sent, Payload(draw(2, 5)), torch.ones(2, dtype=torch.int64))
    assert all(torch.equal(rule.broadcast(after, torch.arange(N)).payload.params[k], before[k]) for k in theta)
    assert (rule.broadcast(after, new).mixing.weights["head"][0, :5] - 0.2).abs().max() > 1e-3  # they learned


def model_of(shape: tuple[int, ...] = (2, 3)) -> Params:
    return Params({"w": torch.zeros(shape, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)})


def hyper(**more: Any) -> tuple[PFedHNServer, Any, Payload]:
    rule = PFedHNServer(embedding=2, hidden=3, depth=1, **more)
    torch.manual_seed(0)
    state = rule.init(model_of(), 3)
    return rule, state, rule.broadcast(state, torch.arange(3)).payload


ONE = torch.tensor([1])
COUNT = torch.ones(1, dtype=torch.int64)


def test_c10_the_gradient_is_the_jacobian_times_the_difference() -> None:
    """d/dphi <h(v; phi), theta - theta~> by finite differences, for every value of phi."""
    rule, state, sent = hyper(hn_lr=1.0, momentum=0.0, weight_decay=0.0, clip=1e9)
    sent = sent.rows(ONE)
    back = sent.params.map(lambda a: a - torch.randn(a.shape, dtype=a.dtype))
    after = rule.aggregate(state, ONE, sent, Payload(back), COUNT)
    difference = sent.params - back

    def along() -> float:
        model = generate_models(state["phi"], state["phi"]["embedding"][ONE])
        return float(sum((model[k] * difference[k]).sum() for k in model))

    for k, values in state["phi"].items():
        flat, change = values.view(-1), (after["phi"][k] - values).view(-1).clone()  # type: ignore[index]
        for j in range(len(flat)):
            kept = flat[j].item()
            flat[j] = kept + 1e-6
            up = along()
            flat[j] = kept - 1e-6
            down = along()
            flat[j] = kept
            assert change[j].item() == pytest.approx(-(up - down) / 2e-6, abs=1e-7), k


def test_c10_a_long_gradient_is_cut_to_length() -> None:
    rule, state, sent = hyper(hn_lr=0.1, momentum=0.0, weight_decay=0.0, clip=0.5)
    back = sent.params.map(lambda a: a - 100)
    after = rule.aggregate(state, ONE, sent.rows(ONE), Payload(back).rows(ONE), COUNT)
    moved = [(after["phi"][k] - v).square().sum() for k, v in state["phi"].items()]  # type: ignore[index]
    assert sum(moved).sqrt().item() == pytest.approx(0.1 * 0.5, rel=1e-9)


def test_c10_clients_of_a_cohort_follow_one_another() -> None:
    rule, state, sent = hyper()
    back = Payload(sent.params.map(lambda a: a + 1))
    ids = torch.tensor([0, 2])
    together = rule.aggregate(state, ids, sent.rows(ids), back.rows(ids), torch.ones(2, dtype=torch.int64))
    one = torch.tensor([0])
    apart = rule.aggregate(state, one, sent.rows(one), back.rows(one), COUNT)
    apart = rule.aggregate(apart, torch.tensor([2]), sent.rows(ids[1:]), back.rows(ids[1:]), COUNT)
    assert all(torch.equal(together["phi"][k], apart["phi"][k]) for k in state["phi"])  # type: ignore[index]


def test_newcomers_of_a_hypernetwork_learn_their_embedding_alone() -> None:
    rule, state, _ = hyper()
    joined = rule.add_clients(state, 2)
    mean = state["phi"]["embedding"].mean(0)
    new = torch.tensor([3, 4])
    sent = rule.broadcast(joined, new).payload
    expected = generate_models(state["phi"], mean[None])
    assert all(torch.allclose(sent.params[k][0], expected[k][0]) for k in expected)
    assert all(torch.equal(rule.newcomer_model(state)[k], expected[k][0]) for k in expected)
    back = Payload(sent.params.map(lambda a: a + 1))
    after = rule.aggregate_newcomers(joined, new, sent, back, torch.ones(2, dtype=torch.int64))
    for k, v in state["phi"].items():
        assert torch.equal(after["phi"][k][: len(v)], v)  # type: ignore[index]
    learned_rows = after["phi"]["embedding"][3:]  # type: ignore[call-overload]
    assert (learned_rows - mean).abs().amax(1).min() > 1e-6
    nearer, before = rule.broadcast(after, new).payload.params - back.params, sent.params - back.params
    assert sum(v.square().sum() for v in nearer.values()) < sum(v.square().sum() for v in before.values())


def test_an_embedding_that_grows_with_the_clients_changes_no_model() -> None:
    """From 3 to 8 clients, the width goes from 1 to 3; the network learns as if it had stayed 1."""
    torch.manual_seed(0)
    state, ids = PFedHNServer(hidden=3, depth=1).init(model_of(), 3), torch.arange(8)
    states = []
    for embedding in (None, 1):
        rule = PFedHNServer(embedding, hidden=3, depth=1)
        grown = rule.add_clients(state, 5)
        for _ in range(2):
            sent = rule.broadcast(grown, ids).payload
            back = Payload(sent.params.map(lambda a: a + 1))
            grown = rule.aggregate(grown, ids, sent, back, torch.ones(8, dtype=torch.int64))
        states.append(grown)
    wide, narrow = states
    assert wide["phi"]["embedding"].shape == (8, 3)
    models = [generate_models(one["phi"], one["phi"]["embedding"]) for one in states]
    for name in model_of():
        torch.testing.assert_close(models[0][name], models[1][name])
    for part in ("phi", "velocity"):
        assert not wide[part]["embedding"][:, 1:].any()  # type: ignore[literal-required]
        assert not wide[part]["trunk.0.weight"][:, 1:].any()  # type: ignore[literal-required]
    torch.testing.assert_close(wide["phi"]["embedding"][:, :1], narrow["phi"]["embedding"])
