"""The methods, one paper per file, and the table of their names."""

from collections.abc import Callable

from ..core import Algorithm
from .fedamp import fedamp, heurfedamp
from .fedavg import fedavg, fedavg_ft
from .fedmcsa import fedmcsa
from .fedmcsa_ablations import fedavg_mcsa, fedmcsa_no_mcsa, pfedme_mcsa
from .fedprox import fedprox
from .local import local
from .perfedavg import perfedavg
from .pfedme import pfedme

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    factory.__name__: factory
    for factory in (
        local,
        fedavg,
        fedavg_ft,
        fedprox,
        perfedavg,
        pfedme,
        fedamp,
        heurfedamp,
        fedmcsa,
        fedmcsa_no_mcsa,
        fedavg_mcsa,
        pfedme_mcsa,
    )
}
"""name -> factory of keyword options."""

__all__ = [
    "ALGORITHMS",
    "fedamp",
    "fedavg",
    "fedavg_ft",
    "fedavg_mcsa",
    "fedmcsa",
    "fedmcsa_no_mcsa",
    "fedprox",
    "heurfedamp",
    "local",
    "perfedavg",
    "pfedme",
    "pfedme_mcsa",
]
