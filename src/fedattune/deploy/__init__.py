"""Federations over a real network, with Flower: one server, and nodes that keep their data."""

from importlib.util import find_spec

from ..core.errors import ConfigError


def require_flower() -> None:
    """Check that Flower is installed."""
    if find_spec("flwr") is None:
        raise ConfigError("a real federation needs Flower: pip install '.[flower]' in the folder of FedAttune")
