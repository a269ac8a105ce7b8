"""FedAttune's methods inside a Flower project, which keeps its ServerApp, ClientApp, model and data.

At the server, `strategy` takes the place of Flower's strategy. At the nodes, `mod` keeps personal layers beside a
custom training function; `train` trains by a method that changes the local steps, and `personal_model` returns the
model to evaluate then.
"""

from ..deploy import require_flower

require_flower()

from .client import mod, personal_model, train  # noqa: E402
from .strategy import MethodStrategy, strategy  # noqa: E402

__all__ = ["MethodStrategy", "mod", "personal_model", "strategy", "train"]
