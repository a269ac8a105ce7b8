"""The methods, one paper per file. Each line below adds one paper to the table `METHODS`.

The order of the lines is the order in which `fedattune list` and the documentation show the methods.
"""

# isort: off
from .local import local as local
from .fedavg import fedavg as fedavg, fedavg_ft as fedavg_ft
from .fedprox import fedprox as fedprox
from .fedlc import fedlc as fedlc
from .moon import moon as moon
from .perfedavg import perfedavg as perfedavg
from .pfedme import pfedme as pfedme
from .fedamp import fedamp as fedamp, heurfedamp as heurfedamp
from .fedmcsa import fedmcsa as fedmcsa, fedmcsa_no_mcsa as fedmcsa_no_mcsa
from .fedmcsa import fedavg_mcsa as fedavg_mcsa, pfedme_mcsa as pfedme_mcsa
from .pfedgraph import pfedgraph as pfedgraph
from .pfedla import pfedla as pfedla, heurpfedla as heurpfedla
from .pfedhn import pfedhn as pfedhn
from .fedbn import fedbn as fedbn
from .fedrep import fedrep as fedrep
from .fedpac import fedpac as fedpac
from .fedper import fedper as fedper
from .lg_fedavg import lg_fedavg as lg_fedavg
from .fedgh import fedgh as fedgh
from .fedbabu import fedbabu as fedbabu
from .fedfomo import fedfomo as fedfomo
from .ifca import ifca as ifca
from .igfl import igfl as igfl, igfl_c as igfl_c, igfl_s as igfl_s
from .fedavgm import fedavgm as fedavgm
from .fedexp import fedexp as fedexp
from .scaffold import scaffold as scaffold
from .fednova import fednova as fednova
from .feddyn import feddyn as feddyn
from .fedopt import fedadam as fedadam, fedyogi as fedyogi, fedadagrad as fedadagrad
from .vrl_sgd import vrl_sgd as vrl_sgd
from .fedam import fedam as fedam
from .fedcp import fedcp as fedcp
from .fedrod import fedrod as fedrod
from .apfl import apfl as apfl
from .ditto import ditto as ditto
from .fedproto import fedproto as fedproto
from .l2gd import l2gd as l2gd
from .mocha import mocha as mocha
from .fedala import fedala as fedala
from .knn_per import knn_per as knn_per
from .feddbe import feddbe as feddbe
from .attune import attune as attune
from .combined import combined as combined
from .table import METHODS as METHODS
# isort: on

ALGORITHMS = {name: entry.factory for name, entry in METHODS.items()}
