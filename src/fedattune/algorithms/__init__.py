"""The methods, one paper per file, and the table of their names."""

from collections.abc import Callable

from ..core.algorithm import Algorithm
from .apfl import apfl
from .combined import combined
from .ditto import ditto
from .fedala import fedala
from .fedam import fedam
from .fedamp import fedamp, heurfedamp
from .fedavg import fedavg, fedavg_ft
from .fedavgm import fedavgm
from .fedbn import fedbn
from .fedcp import fedcp
from .fedfomo import fedfomo
from .fedmcsa import fedavg_mcsa, fedmcsa, fedmcsa_no_mcsa, pfedme_mcsa
from .fedopt import fedadagrad, fedadam, fedyogi
from .fedper import fedper
from .fedprox import fedprox
from .fedrep import fedrep
from .fedrod import fedrod
from .igfl import igfl, igfl_c, igfl_s
from .l2gd import l2gd
from .local import local
from .mocha import mocha
from .perfedavg import perfedavg
from .pfedhn import pfedhn
from .pfedla import heurpfedla, pfedla
from .pfedme import pfedme
from .scaffold import scaffold
from .vrl_sgd import vrl_sgd

__all__ = [
    "ALGORITHMS",
    "apfl",
    "combined",
    "ditto",
    "fedadagrad",
    "fedadam",
    "fedala",
    "fedam",
    "fedamp",
    "fedavg",
    "fedavg_ft",
    "fedavg_mcsa",
    "fedavgm",
    "fedbn",
    "fedcp",
    "fedfomo",
    "fedmcsa",
    "fedmcsa_no_mcsa",
    "fedper",
    "fedprox",
    "fedrep",
    "fedrod",
    "fedyogi",
    "heurfedamp",
    "heurpfedla",
    "igfl",
    "igfl_c",
    "igfl_s",
    "l2gd",
    "local",
    "mocha",
    "perfedavg",
    "pfedhn",
    "pfedla",
    "pfedme",
    "pfedme_mcsa",
    "scaffold",
    "vrl_sgd",
]

_FACTORIES: tuple[Callable[..., Algorithm], ...] = (
    local, fedavg, fedavg_ft, fedprox, perfedavg, pfedme, fedamp, heurfedamp, fedmcsa,
    fedmcsa_no_mcsa, fedavg_mcsa, pfedme_mcsa, pfedla, heurpfedla, pfedhn, fedbn, fedrep, fedper,
    fedfomo, igfl, igfl_c, igfl_s, fedavgm, scaffold, fedadam, fedyogi, fedadagrad, vrl_sgd, fedam,
    fedcp, fedrod, apfl, ditto, l2gd, mocha, fedala, combined,
)  # fmt: skip


ALGORITHMS = {factory.__name__: factory for factory in _FACTORIES}
"""name -> factory of keyword options."""
