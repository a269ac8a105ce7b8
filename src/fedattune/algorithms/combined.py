"""Any server rule with any client rule, each by the name of its method; `combined` has no paper of its own.

server   mcsa, fedamp, heurfedamp, learned (pFedLA)   a mixture for every client
         average, update_attention (IGFL)             one model for all
client   sgd;  prox: g + lam (theta - sent);  scaffold: g - c_i + c;  pfedme, ditto: a personal model

The files of these methods give the equations. In Python, `Algorithm(...)` takes any other parts too.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from ..client import SGD, Proximal
from ..core.algorithm import Algorithm, Participation, ServerUpdate
from ..core.errors import ConfigError
from ..core.options import Count, Fraction, NonNegative, Positive
from ..core.selectors import BatchNorms, Head, NoParameters, Unit
from ..server import Average
from ..server.average import Weighting
from .ditto import DittoClient
from .fedamp import AttentiveMixing, CosineMixing
from .fedmcsa import Attention
from .igfl import AttentionQuery, UpdateAttention
from .pfedla import PFedLAServer
from .pfedme import PFedMeClient
from .scaffold import ControlVariateCorrection, ControlVariateWrapper
from .table import Family, method


class Part(NamedTuple):
    """One part of `combined`: the method whose papers it cites, its constructor, and the constructor's options."""

    method: str
    make: Callable[..., Any]
    options: dict[str, Any] = {}  # noqa: RUF012 (never written to)


def _mcsa(unit: Unit, sigma: float, weighting: Weighting) -> ServerUpdate:
    return Attention(unit, sigma=sigma, size_weighted=weighting == "samples")


SERVER_PARTS = {
    "mcsa": Part("fedmcsa", _mcsa, {"unit": "tensor", "sigma": 50.0, "weighting": "samples"}),
    "fedamp": Part("fedamp", AttentiveMixing, {"unit": "model", "sigma": 1.0, "alpha": 1.0}),
    "heurfedamp": Part("heurfedamp", CosineMixing, {"unit": "model", "sigma": 25.0, "self_weight": 0.5}),
    "update_attention": Part("igfl_s", UpdateAttention, {"query": "time", "weighting": "uniform"}),
    "learned": Part("pfedla", PFedLAServer, {"unit": "layer", "hn_lr": 5e-3}),
    "average": Part("fedavg", Average, {"weighting": "samples"}),
}
CLIENT_PARTS = {
    "sgd": Part("fedavg", SGD),
    "prox": Part("fedprox", lambda lam, start: SGD((Proximal(lam),), start), {"lam": 0.01}),
    "pfedme": Part("pfedme", PFedMeClient, {"lam": 15.0, "K": 5, "personal_lr": 0.05}),
    "ditto": Part(
        "ditto",
        lambda lam, personal_lr, start: DittoClient(lam, personal_lr, SGD(start=start)),
        {"lam": 1.0, "personal_lr": None},
    ),
    "scaffold": Part("scaffold", lambda start: SGD((ControlVariateCorrection(),), start)),
}
PERSONAL_PARTS = {"head": Part("fedper", Head), "norms": Part("fedbn", BatchNorms)}

PART_METHODS = {
    name: part.method
    for parts in (SERVER_PARTS, CLIENT_PARTS, PERSONAL_PARTS)
    for name, part in parts.items()
}
"""Part -> method whose papers it cites."""


@method(
    Family.COMBINED,
    "as FedMCSA, FedAMP, HeurFedAMP, IGFL-S, pFedLA or FedAvg",
    "SGD, or as FedProx, pFedMe, Ditto or SCAFFOLD; maybe personal layers",
    cites=tuple(dict.fromkeys(PART_METHODS.values())),
)
def combined(
    *,
    server: Literal["mcsa", "fedamp", "heurfedamp", "update_attention", "learned", "average"] = "mcsa",
    client: Literal["sgd", "prox", "pfedme", "ditto", "scaffold"] = "sgd",
    personal: Literal["none", "head", "norms"] = "none",
    answered: bool = False,
    unit: Unit | None = None,
    sigma: Positive | None = None,
    alpha: Positive | None = None,
    self_weight: Fraction | None = None,
    query: AttentionQuery | None = None,
    hn_lr: Positive | None = None,
    weighting: Weighting | None = None,
    lam: NonNegative | None = None,
    K: Count | None = None,
    personal_lr: Positive | None = None,
) -> Algorithm:
    """Any server rule with any client rule and personal layers.

    With `answered`, all clients train and the server answers each upload at once. The default of every later option
    is the default of the method that the part comes from.

    Raises:
        ConfigError: no chosen part has one of the given options.

    """
    values = {
        "unit": unit, "sigma": sigma, "alpha": alpha, "self_weight": self_weight, "query": query, "hn_lr": hn_lr,
        "weighting": weighting, "lam": lam, "K": K, "personal_lr": personal_lr,
    }  # fmt: skip
    options = {key: value for key, value in values.items() if value is not None}
    server_part, client_part = SERVER_PARTS[server], CLIENT_PARTS[client]
    if idle := sorted(options.keys() - server_part.options.keys() - client_part.options.keys()):
        raise ConfigError(
            f"combined: {', '.join(idle)}: no part has this option; server={server} has "
            f"{', '.join(server_part.options)}, client={client} has {', '.join(client_part.options) or 'none'}"
        )
    server_options, client_options = (
        {key: options.get(key, default) for key, default in part.options.items()}
        for part in (server_part, client_part)
    )
    rule = server_part.make(**server_options)
    one_model = server in ("average", "update_attention") and client in ("sgd", "prox", "scaffold")
    parts = {"server": server, **server_options, "client": client, **client_options, "personal": personal}
    return Algorithm(
        client_part.make(**client_options, start="newest" if answered else "sent"),
        ControlVariateWrapper(rule) if client == "scaffold" else rule,
        personal=NoParameters() if personal == "none" else PERSONAL_PARTS[personal].make(),
        participation=Participation("all", "reply") if answered else Participation(),
        headline="received" if one_model else "trained",
        bn_buffers="local" if personal == "norms" else None,
        notes=(f"combined: {', '.join(f'{k}={_format_value(v)}' for k, v in parts.items())}",),
    )


def _format_value(value: object) -> str:
    return "none" if value is None else str(value)
