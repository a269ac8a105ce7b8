"""Closed forms of FedAM, FedCP and FedRoD (specification 10 D)."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedattune
from fedattune import Federation, Params, Result
from fedattune.algorithms import ALGORITHMS
from fedattune.algorithms.fedrod import FedRoDNetwork
from fedattune.algorithms.separation import (
    ConditionalPolicy,
    FedAMNetwork,
    FedCPNetwork,
    SeparationModule,
    coral,
    make_client_vector,
    mmd,
    relative_coral,
)
from fedattune.core.task import Task

RUN: dict[str, Any] = {"rounds": 1, "cohort": 6, "steps": 3, "batch_size": 8, "lr": 0.1, "dtype": "float64"}


def fit(name: str, federation: Federation, evaluation_point: str, *, options: Any = None, **more: Any) -> Result:
    """With the model of one point or the other as the one that is kept."""
    from dataclasses import replace

    algorithm = replace(ALGORITHMS[name](**(options or {})), evaluation_point=evaluation_point)
    return fedattune.fit(federation, algorithm, "dnn", model_options={"hidden": 6}, **(RUN | more))


def user_model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double(), torch.randn(7, 5).double()


def features(seed: int, shape: tuple[int, int] = (9, 4)) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_d3_coral() -> None:
    a, b = features(1), features(2)
    by_hand = np.square(np.cov(a.numpy().T) - np.cov(b.numpy().T)).sum() / (4 * 4**2)
    assert coral(a, b).item() == pytest.approx(by_hand, rel=1e-12)
    assert coral(b, a).item() == pytest.approx(by_hand, rel=1e-12)
    assert coral(a + torch.arange(4), b).item() == pytest.approx(by_hand, rel=1e-9)
    assert coral(3 * a, 3 * b).item() == pytest.approx(3**4 * by_hand, rel=1e-12)
    assert coral(a, a).item() == 0
    assert coral(a[:1], b[:1]).item() == 0


def test_d3_relative_alignment_does_not_depend_on_the_scale_of_the_features() -> None:
    a, b = features(1), features(2)
    C_a, C_b = np.cov(a.numpy().T), np.cov(b.numpy().T)
    by_hand = np.square(C_a - C_b).sum() / (np.square(C_a).sum() + np.square(C_b).sum())
    assert relative_coral(a, b).item() == pytest.approx(by_hand, rel=1e-12)
    assert relative_coral(b, a).item() == pytest.approx(by_hand, rel=1e-12)
    assert relative_coral(a + torch.arange(4), b).item() == pytest.approx(by_hand, rel=1e-9)
    assert relative_coral(1e-3 * a, 1e-3 * b).item() == pytest.approx(by_hand, rel=1e-9)
    assert relative_coral(a, 3 * a).item() == pytest.approx((9 - 1) ** 2 / (1 + 81), rel=1e-12)
    assert relative_coral(a, a).item() == 0
    assert relative_coral(a[:1], b[:1]).item() == 0


def standardised(u: Tensor) -> Tensor:
    return (u - u.mean(1, keepdim=True)) / u.std(1, correction=0, keepdim=True)


def test_d4_heads_see_the_personal_features_in_their_shares() -> None:
    """Without training noise: y = H_p(r f_p) + H_g((1 - r) f_p), r from f_p * v; E_g does not enter."""
    model, x = user_model()
    for network in (
        FedAMNetwork(hidden=5),
        FedAMNetwork(hidden=5, normalize=False, vector="sum"),
        FedCPNetwork(noise=False),
        FedAMNetwork(hidden=5, combine="probabilities"),
        FedAMNetwork(hidden=5, context="concatenated"),
        FedAMNetwork(hidden=5, context="concatenated", normalize=False),
        FedCPNetwork(noise=False, context="client"),
    ):
        net = network.wrap(model, x)
        assert isinstance(net, SeparationModule)
        v = torch.rand(4).double()
        net.context.data = v
        for parameter in net.global_head.parameters():
            nn.init.normal_(parameter)
        for parameter in net.global_body.parameters():
            nn.init.normal_(parameter)
        f = net.body(x)
        change = standardised if network.normalize else torch.Tensor.clone
        if network.context == "concatenated":
            u = torch.cat([change(f), change(v.expand_as(f))], 1)
        else:
            u = change(f * v) if network.context == "product" else v.expand_as(f)
        r = net.attention(u)[:, 0]
        assert torch.allclose(net.gates(x), r, atol=1e-7)
        assert bool((r[0] - r[1]).abs().max() > 1e-4) is (network.context != "client")
        own, shared = net.head(r * f), net.global_head((1 - r) * f)
        logits, features_p, features_g = net.train()(x)
        assert torch.equal(features_p, f)
        assert torch.equal(features_g, net.global_body(x))
        if network.combine == "logits":
            assert torch.allclose(logits, own + shared, atol=1e-7)
        else:
            assert torch.allclose(logits.exp(), (own.softmax(1) + shared.softmax(1)) / 2, atol=1e-7)
        assert torch.allclose(net.eval()(x), logits, atol=1e-14)


def test_d5_the_global_head_is_a_mixture(ragged: Federation) -> None:
    """c=0 keeps it, c=1 gives the average of the personal heads, weighted by samples; the body's is that of E_p."""
    n = torch.tensor([len(c.train) for c in ragged.clients], dtype=torch.float64)
    p = n / n.sum()
    for c in (0.0, 0.3, 1.0):
        result = fit("fedam", ragged, "trained", options={"head_mix": c})
        assert result.trained_server
        first = dict(result.trained_server.trained_module.named_parameters())
        w = result.trained_server.state["w"]
        assert isinstance(w, Params)
        for k in ("weight", "bias"):
            mean = torch.tensordot(p, result.models[f"head.{k}"], 1)
            expected = (1 - c) * first[f"global_head.{k}"] + c * mean
            assert torch.allclose(w[f"global_head.{k}"], expected, atol=1e-14)
            mean = torch.tensordot(p, result.models[f"body.1.{k}"], 1)
            assert torch.allclose(w[f"global_body.1.{k}"], mean, atol=1e-14)


def test_d7_the_extractor_starts_from_the_global_one_or_goes_on(ragged: Federation) -> None:
    """With reset, all clients receive one extractor and keep their own heads; without, both are their own."""
    for reset in (True, False):
        result = fit("fedam", ragged, "received", options={"reset_personal_extractor": reset})
        bodies, heads = result.models["body.1.weight"], result.models["head.weight"]
        assert torch.equal(bodies[0], bodies[1]) is reset
        assert torch.equal(bodies, result.models["global_body.1.weight"]) is reset
        assert (heads[0] - heads[1]).abs().max() > 1e-3


def test_d7_the_sum_of_the_class_weights_never_moves(ragged: Federation) -> None:
    """Gradients of cross-entropy sum to zero over classes, so client_vector=sum is one vector for all, for ever."""
    for kind, alike in (("sum", True), ("absolute", False), ("difference", False)):
        result = fit("fedam", ragged, "received", options={"client_vector": kind}, rounds=4, lr=0.5)
        assert result.trained_server
        v = result.models["context"]
        first = make_client_vector("sum", *(result.trained_server.trained_module.head.weight,) * 2)  # type: ignore[union-attr,arg-type]
        assert torch.allclose(v, first.expand_as(v), atol=1e-12) is alike
        assert (v.norm(dim=1) - 1).abs().max() < 1e-12
        assert any("client_vector=sum" in note for note in result.notes) is alike


def two_heads(counts: list[float]) -> tuple[Task, Params, tuple[Tensor, ...]]:
    model, x = user_model()
    task = Task(FedRoDNetwork().wrap(model, x))
    buffers = FedRoDNetwork().client_buffers(torch.tensor([counts], dtype=torch.float64)).rows(0)
    return task, buffers, (x, torch.tensor([0, 1, 2, 0, 1, 2, 0]))


def test_d8_with_equal_counts_the_generic_head_learns_by_cross_entropy() -> None:
    """And in general by the balanced loss; nothing of the personal head's loss reaches the body or generic head."""
    for counts in ([5.0, 5.0, 5.0], [1.0, 2.0, 30.0]):
        task, buffers, batch = two_heads(counts)
        g, _ = task.gradient(task.params, buffers, batch)
        w = {k: v.clone().requires_grad_() for k, v in task.params.items()}
        f = torch.tanh(nn.functional.linear(batch[0], w["body.0.weight"], w["body.0.bias"]))
        logits = nn.functional.linear(f, w["head.weight"], w["head.bias"])
        added = torch.zeros(3) if counts[0] == counts[2] else torch.tensor(counts).double().log()
        cross_entropy(logits + added, batch[1]).backward()
        for k in ("body.0.weight", "body.0.bias", "head.weight", "head.bias"):
            assert torch.allclose(g[k], w[k].grad, atol=1e-14), k
        own = nn.functional.linear(f.detach(), w["personal_head.weight"], w["personal_head.bias"])
        cross_entropy(logits.detach() + own, batch[1]).backward()
        for k in ("personal_head.weight", "personal_head.bias"):
            assert torch.allclose(g[k], w[k].grad, atol=1e-14), k


def test_d8_generic_and_personal_prediction(ragged: Federation) -> None:
    """The global model is G(f); with a personal head of zeros it is also what a client starts with."""
    zero = fedattune.fit(ragged, "fedrod", "mlr", options={"personal_init": "zeros"}, **(RUN | {"lr": 1e-12}))
    assert zero.history[-1]["global"]["loss_uniform"] == pytest.approx(zero.metrics["loss_uniform"], abs=1e-9)
    copied = fedattune.fit(ragged, "fedrod", "mlr", **(RUN | {"lr": 1e-12}))
    x = ragged.features(torch.arange(5), torch.float64)
    assert torch.allclose(copied.model(0)(x), 2 * zero.model(0)(x), atol=1e-9)


def test_d9_mmd() -> None:
    a, b = features(3), features(4)
    assert mmd(a, a).item() == pytest.approx(0, abs=1e-14)
    by_hand = 0.0
    for s in (10, 15, 20, 50):
        for i in range(9):
            for j in range(9):
                for x, y, sign in ((a[i], a[j], 1), (b[i], b[j], 1), (a[i], b[j], -2)):
                    by_hand += sign * float(torch.exp(-((x - y) ** 2).sum() / (2 * s))) / 81
    assert mmd(a, b).item() == pytest.approx(by_hand, rel=1e-10)
    assert mmd(a, b) > 0


def test_d9_noise_is_drawn_while_training_only() -> None:
    torch.manual_seed(5)
    u = features(5)
    policy = ConditionalPolicy(4, noise=True).double()
    assert not torch.equal(policy(u), policy(u))
    assert torch.equal(policy.eval()(u), policy(u))
    quiet = ConditionalPolicy(4, noise=False).double()
    assert torch.equal(quiet(u), quiet(u))
    # Gumbel noise makes the larger of two equal scores each with probability 1/2, and differences logistic:
    # P(r > 1/(1 + e^-1)) = P(logistic > 1) = 1 / (1 + e).
    for parameter in policy.parameters():
        nn.init.zeros_(parameter)
    r = policy.train()(u.new_zeros(5000, 4))[:, 0]
    for threshold in (0.0, 1.0):
        share = (torch.logit(r) > threshold).double().mean().item()
        assert share == pytest.approx(1 / (1 + np.exp(threshold)), abs=0.015)
