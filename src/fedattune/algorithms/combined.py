"""Any server rule with any client rule, each by the name of the method that it comes from: no paper of its own.

server   mcsa, fedamp, heurfedamp, learned (of pFedLA)   a mixture for every client
         average, update_attention (of IGFL)             one model for all
client   sgd;  prox: g + lam (theta - what was sent);  scaffold: g - c_i + c;  pfedme, ditto: a model of their own
The equations stand on top of the files of these methods. In Python other parts go together too, as Algorithm(...).
"""

from typing import Literal

from ..core import Algorithm, Participation
from ..errors import ConfigError
from ..registry import Count, Fraction, NonNegative, Positive, options
from ..select import Head, Norms, Nothing, Unit
from ..server import Controls
from ..server.average import Weighting
from ..server.update_attention import Query
from .parts import CLIENTS, SERVERS


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
    query: Query | None = None,
    hn_lr: Positive | None = None,
    weighting: Weighting | None = None,
    lam: NonNegative | None = None,
    K: Count | None = None,
    personal_lr: Positive | None = None,
) -> Algorithm:
    """Any server rule with any client rule and personal layers.

    `answered`: all clients train, and uploads are answered at once. The options after it have the default of the
    method that a part comes from unless given, and are refused where no chosen part has them.
    """
    every = {
        "unit": unit, "sigma": sigma, "alpha": alpha, "self_weight": self_weight, "query": query, "hn_lr": hn_lr,
        "weighting": weighting, "lam": lam, "K": K, "personal_lr": personal_lr,
    }  # fmt: skip
    given = {key: value for key, value in every.items() if value is not None}
    of_server = {o.name: given.get(o.name, o.default) for o in options(SERVERS[server])}
    of_client = {o.name: given.get(o.name, o.default) for o in options(CLIENTS[client])}
    if idle := sorted(given.keys() - of_server.keys() - of_client.keys()):
        raise ConfigError(
            f"combined: {', '.join(idle)}: no part has this option; server={server} has "
            f"{', '.join(of_server)}, client={client} has {', '.join(of_client) or 'none'}"
        )
    start: Literal["sent", "newest"] = "newest" if answered else "sent"
    rule = SERVERS[server](**of_server)
    one_model = server in ("average", "update_attention") and client in ("sgd", "prox", "scaffold")
    parts = {"server": server, **of_server, "client": client, **of_client, "personal": personal}
    return Algorithm(
        CLIENTS[client](start, **of_client),
        Controls(rule) if client == "scaffold" else rule,
        personal={"none": Nothing(), "head": Head(), "norms": Norms()}[personal],
        participation=Participation("all", "reply") if answered else Participation(),
        headline="received" if one_model else "trained",
        bn_buffers="local" if personal == "norms" else None,
        notes=(f"combined: {', '.join(f'{k}={_said(v)}' for k, v in parts.items())}",),
    )


def _said(value: object) -> str:
    return "none" if value is None else str(value)
