"""W7: mix models on the server, against plain expressions for the same mixtures.

The clock runs over one round of the server: it takes in all uploads and makes all payloads. The roofline of MCSA
counts two products per component, theta theta^T and M theta (4 C^2 P operations). Its bytes are the uploads read and
written to the store, the store read by each product, and the payloads. Learned mixing has G theta^T instead of theta
theta^T, and reads the heads of the hypernetworks twice and writes them once. The peak memory of a way includes the
uploads, the store, and the payloads of two rounds.

The roofline's rate is measured on square matrices of 3,072. `products` are the two products alone, into allocated
memory: the speed of PyTorch's library for matrices with as few rows as there are clients.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fedattune import Params, Payload, ServerUpdate
from fedattune.algorithms.fedmcsa import Attention
from fedattune.algorithms.pfedla import PFedLAServer
from fedattune.core.hardware import keep_freed_memory
from fedattune.core.payload import ServerState
from fedattune.core.selectors import group_names
from fedattune.models import build_model

from .measure import Case, Figures, Setting, Target, Way, Workload, lazily, measure

SIGMA = 50.0
WIDTH = 100
"""Embedding and hidden layers of pFedLA's hypernetworks."""


@dataclass(frozen=True)
class Cohort:
    """Clients that all take part: their number, and a function that makes their model."""

    clients: int
    model: Callable[[], nn.Module]

    def params(self, device: torch.device) -> Params:
        """Make the initial model."""
        torch.manual_seed(0)
        return Params({k: v.detach().to(device) for k, v in self.model().named_parameters()})

    def uploads(self, w0: Params) -> Params:
        """Make models (C, ...) around the initial one."""
        stack = w0.copies(self.clients)
        for tensor in stack.values():
            for row in tensor:  # one by one: no second stack
                row.add_(torch.randn_like(row), alpha=0.02)
        return stack


def small() -> nn.Module:
    """Make a small model for tests."""
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))


def dnn(hidden: int) -> Callable[[], nn.Module]:
    """Make a factory of networks with one hidden layer between 784 inputs and 10 classes."""
    return lambda: build_model("dnn", (1, 28, 28), 10, {"hidden": hidden})


def resnet18() -> nn.Module:
    """Make ResNet-18 for images of 32x32."""
    return build_model("resnet18", (3, 32, 32), 10, {"stem": "3x3"})


Uploads = Callable[[], Params]
"""Returns all uploads, the same tensors for all ways: they take gigabytes."""


def ours(rule: ServerUpdate, cohort: Cohort, device: torch.device, uploaded: Uploads) -> Way:
    """Mix by the package's rule, with the same uploads in each round."""
    if device.type == "cpu":
        keep_freed_memory()  # as the engine of a run does
    w0 = cohort.params(device)
    uploads, ids = uploaded(), torch.arange(cohort.clients, device=device)
    n = torch.ones_like(ids)
    torch.manual_seed(1)
    state: ServerState = rule.init(w0, cohort.clients)
    sent = Payload(w0.repeat(cohort.clients))

    def run(_: int) -> Params:
        nonlocal state, sent
        state = rule.aggregate(state, ids, sent, Payload(uploads), n)
        new = rule.broadcast(state, ids).payload
        if isinstance(rule, PFedLAServer):
            sent = new  # it learns from the models sent
        return new.params

    return run


def plain_attention(cohort: Cohort, device: torch.device, uploaded: Uploads) -> Way:
    """Mix layer by layer: concatenate, normalize, multiply, softmax, multiply."""
    w0 = cohort.params(device)
    uploads, bank = uploaded(), w0.copies(cohort.clients)

    def run(_: int) -> Params:
        new: dict[str, Tensor] = {}
        for name, tensor in uploads.items():
            bank[name].copy_(tensor)
        for names in group_names(bank, "layer").values():
            theta = torch.cat([bank[name].flatten(1) for name in names], 1)
            unit = theta / theta.norm(dim=1, keepdim=True).clamp_min(1e-12)
            mixture = torch.softmax(SIGMA * (unit @ unit.T), 1) @ theta
            parts = torch.split(mixture, [bank[name][0].numel() for name in names], 1)
            new |= {name: part.view_as(bank[name]) for name, part in zip(names, parts, strict=True)}
        return Params(new)

    return run


def plain_learned(cohort: Cohort, device: torch.device, uploaded: Uploads, lr: float) -> Way:
    """Mix by hypernetworks as batched products under autograd, and two products per layer."""
    w0 = cohort.params(device)
    uploads, bank, n = uploaded(), w0.copies(cohort.clients), cohort.clients
    torch.manual_seed(1)
    networks = PFedLAServer(embedding=WIDTH, hidden=WIDTH).init(w0, n)["hypernetworks"]
    assert isinstance(networks, Params)
    components = group_names(bank, "layer")
    sent = w0.repeat(n)

    def alpha(values: dict[str, Tensor]) -> Tensor:
        h = values["embedding"]
        for i in range(3):
            h = torch.einsum("roi,ri->ro", values[f"trunk.{i}.weight"], h) + values[f"trunk.{i}.bias"]
            h = h.relu()
        z = torch.einsum("rlkh,rh->rlk", values["head.weight"], h) + values["head.bias"]
        return torch.softmax(z, 2)

    def run(_: int) -> Params:
        nonlocal sent
        inner = []
        for names in components.values():
            G = torch.cat([(sent[k] - uploads[k]).flatten(1) for k in names], 1)
            theta = torch.cat([bank[k].flatten(1) for k in names], 1)
            inner.append(G @ (theta - theta[:1]).T)
        leaves = {k: v.requires_grad_() for k, v in networks.items()}
        with torch.enable_grad():
            found = torch.autograd.grad(alpha(leaves), list(leaves.values()), torch.stack(inner, 1))
        for leaf, g in zip(leaves.values(), found, strict=True):
            leaf.detach_().sub_(g, alpha=lr)
        for name, tensor in uploads.items():
            bank[name].copy_(tensor)
        weights = alpha(networks)
        sent = Params(
            {
                k: torch.mm(weights[:, i], bank[k].flatten(1)).view_as(bank[k])
                for i, names in enumerate(components.values())
                for k in names
            }
        )
        return sent

    return run


def products(cohort: Cohort, device: torch.device, uploaded: Uploads) -> Way:
    """Compute the two products per tensor, and nothing else."""
    uploads, n = uploaded(), cohort.clients
    weights = torch.full((n, n), 1 / n, device=device)
    alike = torch.empty(n, n, device=device)
    out = torch.empty(max(v.numel() for v in uploads.values()), device=device)

    def run(_: int) -> Params:
        for tensor in uploads.values():
            theta = tensor.flatten(1)
            torch.mm(theta, theta.T, out=alike)
            torch.mm(weights, theta, out=out[: theta.numel()].view_as(theta))
        return Params({"last": out[None]})

    return run


def briefly(make: Callable[[], Way]) -> Way:
    """Make a way that returns a few values of every tensor, so that the results of several ways fit into memory."""
    way = lazily(make)
    return lambda r: {k: v.flatten(1)[:, :50].clone() for k, v in way(r).items()}


def same(results: dict[str, Any]) -> None:
    """Raise if two ways made different mixtures."""
    for name, tensor in results["floor"].items():
        assert_close(tensor, results["fedattune"][name], rtol=1e-3, atol=1e-4)


ATTENTION = Attention("layer", sigma=SIGMA)
LEARNED = PFedLAServer(embedding=WIDTH, hidden=WIDTH)

MIXED: dict[str, tuple[str, Cohort, ServerUpdate]] = {
    "W7-mcsa-resnet": ("MCSA over 100 clients of ResNet-18", Cohort(100, resnet18), ATTENTION),
    "W7-mcsa-dnn": ("MCSA over 1,000 clients of 100k parameters", Cohort(1000, dnn(126)), ATTENTION),
    "W7-mcsa-mlr": (
        "MCSA over 5,000 clients of 8k parameters",
        Cohort(5000, lambda: build_model("mlr", (1, 28, 28), 10, {})),
        ATTENTION,
    ),
    "W7-pfedla-100": ("pFedLA over 100 clients of 80k parameters", Cohort(100, dnn(100)), LEARNED),
    "W7-pfedla-500": ("pFedLA over 500 clients of 80k parameters", Cohort(500, dnn(100)), LEARNED),
    "W7-pfedla-1000": ("pFedLA over 1,000 clients of 80k parameters", Cohort(1000, dnn(100)), LEARNED),
}
"""Case -> description, clients, server rule."""


def all_ways(name: str, setting: Setting) -> dict[str, Callable[[], Way]]:
    """Make functions that make the ways of a case; they share the uploads."""
    _, cohort, rule = MIXED[name]
    if setting.quick:
        cohort = replace(cohort, clients=min(cohort.clients, 5), model=small)
    uploaded, device = cache(lambda: cohort.uploads(cohort.params(setting.device))), setting.device
    floor: Callable[[], Way] = lambda: plain_attention(cohort, device, uploaded)  # noqa: E731
    if isinstance(rule, PFedLAServer):
        lr = rule.hn_lr
        floor = lambda: plain_learned(cohort, device, uploaded, lr)  # noqa: E731
    return {
        "floor": floor,
        "products": lambda: products(cohort, device, uploaded),
        "fedattune": lambda: ours(rule, cohort, device, uploaded),
    }


def _run(name: str, setting: Setting) -> Figures:
    """Measure a case with its least operations and bytes."""
    about, cohort, rule = MIXED[name]
    C = min(cohort.clients, 5) if setting.quick else cohort.clients
    params = (replace(cohort, model=small) if setting.quick else cohort).params(torch.device("cpu"))
    P, heads = params.numel(), 0.0
    if isinstance(rule, PFedLAServer):
        heads = C * C * len(group_names(params, rule.unit)) * rule.hidden
    return measure(
        Workload(
            name,
            about,
            ways={way: briefly(make) for way, make in all_ways(name, setting).items()},
            targets=(Target("fedattune", "roofline", 1 / 0.6), Target("fedattune", "floor", 0.6)),
            flops=4.0 * C * C * P + 6.0 * heads,
            bytes=4.0 * ((8.0 if heads else 5.0) * C * P + 4.0 * heads),
            repeats=5,
            warmup=1,
            check=same,
        ),
        setting,
    )


CASES = tuple(Case(name, about, partial(_run, name)) for name, (about, *_) in MIXED.items())
