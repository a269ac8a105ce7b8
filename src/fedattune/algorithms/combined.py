"""Any server rule with any client rule, each by the name of its method; `combined` has no paper of its own.

server   mcsa, fedamp, heurfedamp, learned (pFedLA)   a mixture for every client
         average, update_attention (IGFL)             one model for all
client   sgd;  prox: g + lam (theta - sent);  scaffold: g - c_i + c;  pfedme, ditto: a personal model

The files of these methods give the equations. In Python, `Algorithm(...)` takes any other parts too.
"""

from collections.abc import Callable
from typing import Literal

from ..client import SGD, Proximal
from ..core.algorithm import Algorithm, ClientUpdate, Participation, ServerUpdate
from ..core.errors import ConfigError
from ..core.options import Count, Fraction, NonNegative, Positive, list_options
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

PartStart = Literal["sent", "newest"]


def _mcsa(*, unit: Unit = "tensor", sigma: float = 50.0, weighting: Weighting = "samples") -> ServerUpdate:
    return Attention(unit, sigma=sigma, size_weighted=weighting == "samples")


def _fedamp(*, unit: Unit = "model", sigma: float = 1.0, alpha: float = 1.0) -> ServerUpdate:
    return AttentiveMixing(unit, alpha=alpha, sigma=sigma)


def _heurfedamp(*, unit: Unit = "model", sigma: float = 25.0, self_weight: float = 0.5) -> ServerUpdate:
    return CosineMixing(unit, sigma=sigma, self_weight=self_weight)


def _update_attention(*, query: AttentionQuery = "time", weighting: Weighting = "uniform") -> ServerUpdate:
    return UpdateAttention(weighting, query=query)


def _learned(*, unit: Unit = "layer", hn_lr: float = 5e-3) -> ServerUpdate:
    return PFedLAServer(unit, hn_lr)


def _average(*, weighting: Weighting = "samples") -> ServerUpdate:
    return Average(weighting)


def _sgd(start: PartStart) -> ClientUpdate:
    return SGD(start=start)


def _prox(start: PartStart, *, lam: float = 0.01) -> ClientUpdate:
    return SGD((Proximal(lam),), start=start)


def _pfedme(start: PartStart, *, lam: float = 15.0, K: int = 5, personal_lr: float = 0.05) -> ClientUpdate:
    return PFedMeClient(lam, K, personal_lr, start)


def _ditto(start: PartStart, *, lam: float = 1.0, personal_lr: float | None = None) -> ClientUpdate:
    return DittoClient(lam, personal_lr, SGD(start=start))


def _scaffold(start: PartStart) -> ClientUpdate:
    return SGD((ControlVariateCorrection(),), start=start)


SERVER_PARTS: dict[str, Callable[..., ServerUpdate]] = {
    "mcsa": _mcsa,
    "fedamp": _fedamp,
    "heurfedamp": _heurfedamp,
    "update_attention": _update_attention,
    "learned": _learned,
    "average": _average,
}


CLIENT_PARTS: dict[str, Callable[..., ClientUpdate]] = {
    "sgd": _sgd,
    "prox": _prox,
    "pfedme": _pfedme,
    "ditto": _ditto,
    "scaffold": _scaffold,
}
"""Part -> factory whose keywords have the defaults of the part's method."""


PART_METHODS = {
    "mcsa": "fedmcsa",
    "fedamp": "fedamp",
    "heurfedamp": "heurfedamp",
    "update_attention": "igfl_s",
    "learned": "pfedla",
    "average": "fedavg",
    "sgd": "fedavg",
    "prox": "fedprox",
    "pfedme": "pfedme",
    "ditto": "ditto",
    "scaffold": "scaffold",
    "head": "fedper",
    "norms": "fedbn",
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
    given = {key: value for key, value in values.items() if value is not None}
    server_options = {o.name: given.get(o.name, o.default) for o in list_options(SERVER_PARTS[server])}
    client_options = {o.name: given.get(o.name, o.default) for o in list_options(CLIENT_PARTS[client])}
    if idle := sorted(given.keys() - server_options.keys() - client_options.keys()):
        raise ConfigError(
            f"combined: {', '.join(idle)}: no part has this option; server={server} has "
            f"{', '.join(server_options)}, client={client} has {', '.join(client_options) or 'none'}"
        )
    start: PartStart = "newest" if answered else "sent"
    rule = SERVER_PARTS[server](**server_options)
    one_model = server in ("average", "update_attention") and client in ("sgd", "prox", "scaffold")
    parts = {"server": server, **server_options, "client": client, **client_options, "personal": personal}
    return Algorithm(
        CLIENT_PARTS[client](start, **client_options),
        ControlVariateWrapper(rule) if client == "scaffold" else rule,
        personal={"none": NoParameters(), "head": Head(), "norms": BatchNorms()}[personal],
        participation=Participation("all", "reply") if answered else Participation(),
        headline="received" if one_model else "trained",
        bn_buffers="local" if personal == "norms" else None,
        notes=(f"combined: {', '.join(f'{k}={_format_value(v)}' for k, v in parts.items())}",),
    )


def _format_value(value: object) -> str:
    return "none" if value is None else str(value)
