"""Federations over a real network, with Flower: one server, and nodes that keep their data."""

import importlib.metadata
from importlib.util import find_spec

from ..core.errors import ConfigError

FLOWER_VERSIONS = ">=1.40,<1.43"
"""Versions of Flower that work here, as in the extra `flower`; deployments also use names that it does not publish."""


def require_flower() -> None:
    """Check that Flower is installed."""
    if find_spec("flwr") is None:
        raise ConfigError("a real federation needs Flower: pip install '.[flower]' in the folder of FedAttune")


def check_flower_version() -> None:
    """Refuse a version of Flower with which this version of FedAttune was not tested."""
    from packaging.specifiers import SpecifierSet

    version = importlib.metadata.version("flwr")
    if version not in SpecifierSet(FLOWER_VERSIONS):
        raise ConfigError(
            f"Flower {version} is installed, expected {FLOWER_VERSIONS}; pip install 'flwr{FLOWER_VERSIONS}'"
        )
