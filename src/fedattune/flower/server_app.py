"""The Flower ServerApp: the round loop of a simulation, over the nodes of a grid."""

import sys
from collections.abc import Mapping

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ..core import Algorithm
from ..errors import FedAttuneError
from .server import lead


def make_server_app(own: Mapping[str, Algorithm] | None = None) -> ServerApp:
    """A ServerApp that also knows methods of the user's own, by name.

    A module that assigns it to `app` is named under `serverapp` in the app's pyproject.toml.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            lead(grid, context.run_config, own, lambda sentence: print(f"fedattune: {sentence}", flush=True))
        except FedAttuneError as error:
            sys.exit(f"fedattune: error: {error}")

    return app


app = make_server_app()
