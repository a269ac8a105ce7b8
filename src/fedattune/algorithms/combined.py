"""Any server rule with any client rule, each by the name of its method; `combined` has no paper of its own.

server   mcsa, fedamp, heurfedamp, learned (pFedLA)   a mixture for every client
         average, update_attention (IGFL)             one model for all
client   sgd;  prox: g + lam (theta - sent);  scaffold: g - c_i + c;  pfedme, ditto: a personal model

The files of these methods give the equations. In Python, `Algorithm(...)` takes any other parts too.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from ..client import SGD, Proximal
from ..core.algorithm import ANSWERED_UPLOADS, Algorithm, Participation, ServerUpdate
from ..core.errors import ConfigError
from ..core.options import Count, Fraction, NonNegative, Positive
from ..core.selectors import BatchNorms, Head, NoParameters, Unit
from ..server import Average
from ..server.average import Weighting
from .ditto import DittoClient
from .fedamp import DEFAULT_ALPHA, DEFAULT_SIGMA, AttentiveMixing, CosineMixing
from .fedmcsa import Attention
from .igfl import AttentionKind, UpdateAttention
from .pfedla import PFedLAServer
from .pfedme import PFedMeClient
from .scaffold import ControlVariateCorrection, ControlVariateWrapper
from .table import Family, method


class RulePart(NamedTuple):
    """One part of `combined`: the method that it comes from, its constructor, and options with their defaults."""

    method: str
    make: Callable[..., Any]
    options: dict[str, Any] = {}  # noqa: RUF012 (never written to)


def _mcsa(unit: Unit, sigma: float, weighting: Weighting) -> ServerUpdate[Any]:
    return Attention(unit, sigma=sigma, size_weighted=weighting == "samples")


def _heurfedamp(unit: Unit, sigma: float, self_weight: float | Literal["attention"]) -> ServerUpdate[Any]:
    return CosineMixing(unit, sigma=sigma, self_weight=None if self_weight == "attention" else self_weight)


SERVER_PARTS = {
    "mcsa": RulePart("fedmcsa", _mcsa, {"unit": "tensor", "sigma": 50.0, "weighting": "samples"}),
    "fedamp": RulePart("fedamp", AttentiveMixing, {"unit": "model", "sigma": DEFAULT_SIGMA, "alpha": DEFAULT_ALPHA}),
    "heurfedamp": RulePart("heurfedamp", _heurfedamp, {"unit": "model", "sigma": 25.0, "self_weight": 0.5}),
    "update_attention": RulePart("igfl_s", UpdateAttention, {"attention": "time", "weighting": "uniform"}),
    "learned": RulePart("pfedla", PFedLAServer, {"unit": "layer", "hn_lr": 5e-3}),
    "average": RulePart("fedavg", Average, {"weighting": "samples"}),
}
CLIENT_PARTS = {
    "sgd": RulePart("fedavg", SGD),
    "prox": RulePart("fedprox", lambda lam, start: SGD((Proximal(lam),), start), {"lam": 0.1}),
    "pfedme": RulePart("pfedme", PFedMeClient, {"lam": 15.0, "K": 5, "personal_lr": 0.05}),
    "ditto": RulePart(
        "ditto",
        lambda lam, personal_lr, start: DittoClient(lam, personal_lr, SGD(start=start)),
        {"lam": 1.0, "personal_lr": None},
    ),
    "scaffold": RulePart("scaffold", lambda start: SGD((ControlVariateCorrection(),), start)),
}
PERSONAL_SELECTORS = {"head": RulePart("fedper", Head), "norms": RulePart("fedbn", BatchNorms)}

PART_METHODS = {
    name: part.method for parts in (SERVER_PARTS, CLIENT_PARTS, PERSONAL_SELECTORS) for name, part in parts.items()
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
    answer: bool = False,
    unit: Unit | None = None,
    sigma: NonNegative | None = None,
    alpha: Positive | None = None,
    self_weight: Fraction | Literal["attention"] | None = None,
    attention: AttentionKind | None = None,
    hn_lr: Positive | None = None,
    weighting: Weighting | None = None,
    lam: NonNegative | None = None,
    K: Count | None = None,
    personal_lr: Positive | None = None,
) -> Algorithm:
    """Any server rule with any client rule and personal layers.

    An option of None takes the default of the part's method. Brackets name the parts that have an option.

    Args:
        server: rule of the server, from `fedmcsa` (mcsa), `fedamp`, `heurfedamp`, `igfl_s` (update_attention), `pfedla`
            (learned) or `fedavg` (average).
        client: rule of the clients, from `fedavg` (sgd), `fedprox` (prox), `pfedme`, `ditto` or `scaffold`.
        personal: tensors that never leave the client: `none`, `head` (the last linear layer), or `norms` (BatchNorm).
        answer: whether all clients train and the server answers the cohort's uploads at once, as in FedMCSA.
            With False, only the cohort trains.
        unit: part of the model that shares one mixing matrix: `model`, `layer` or `tensor` (mcsa, fedamp, heurfedamp,
            learned).
        sigma: factor of the cosines (mcsa, heurfedamp), or scale of the relative squared distances, above 0 (fedamp).
        alpha: largest step alpha_k, that is, weight of an equal model (fedamp).
        self_weight: share of the own model, from 0 to 1, or `attention`: as in `heurfedamp` (heurfedamp).
        attention: query of the attention: `self`, `global` or `time` (update_attention).
        hn_lr: learning rate of the hypernetworks (learned).
        weighting: weights of the clients: by training samples, or `uniform` (mcsa, update_attention, average).
        lam: strength of the pull to the received model (prox, ditto), or of theta_i to w_i (pfedme).
        K: steps of theta_i per local step (pfedme).
        personal_lr: learning rate of theta_i (pfedme) or v_i (ditto); None takes the run's learning rate for ditto.

    Raises:
        ConfigError: no chosen part has one of the given options, or sigma is 0 for `fedamp`.
    """
    values = {
        "unit": unit, "sigma": sigma, "alpha": alpha, "self_weight": self_weight, "attention": attention,
        "hn_lr": hn_lr, "weighting": weighting, "lam": lam, "K": K, "personal_lr": personal_lr,
    }  # fmt: skip
    options = {key: value for key, value in values.items() if value is not None}
    server_part, client_part = SERVER_PARTS[server], CLIENT_PARTS[client]
    if idle := sorted(options.keys() - server_part.options.keys() - client_part.options.keys()):
        raise ConfigError(
            f"combined: {', '.join(idle)}: no part has this option; server={server} has "
            f"{', '.join(server_part.options)}, client={client} has {', '.join(client_part.options) or 'none'}"
        )
    if server == "fedamp" and sigma == 0:
        raise ConfigError("combined: sigma: got 0, expected a number above 0 for server=fedamp")
    server_options, client_options = (
        {key: options.get(key, default) for key, default in part.options.items()} for part in (server_part, client_part)
    )
    rule = server_part.make(**server_options)
    one_model = server in ("average", "update_attention") and client in ("sgd", "prox", "scaffold")
    parts = {"server": server, **server_options, "client": client, **client_options, "personal": personal}
    parts = {name: "none" if value is None else value for name, value in parts.items()}
    return Algorithm(
        client_part.make(**client_options, start="newest" if answer else "sent"),
        ControlVariateWrapper(rule) if client == "scaffold" else rule,
        personal=NoParameters() if personal == "none" else PERSONAL_SELECTORS[personal].make(),
        participation=ANSWERED_UPLOADS if answer else Participation(),
        evaluation_point="received" if one_model else "trained",
        bn_buffers="local" if personal == "norms" else None,
        notes=(f"combined: {', '.join(f'{k}={v}' for k, v in parts.items())}",),
    )
