"""Tell which methods can work under secure aggregation, and why the others cannot."""

from collections.abc import Mapping

from ...core.algorithm import Algorithm, SumWeighting, find_needed_sums
from ...core.errors import ConfigError
from ...core.settings import Settings
from ...training.uploads.pipeline import list_single_upload_options

MIN_NODES, MAX_NODES = 3, 49
"""Nodes of a federation with secure aggregation; each node makes a share for every other one."""

REFUSAL = (
    "a server that knows the weights W and the mixtures W X solves for X, so the sums that secure aggregation gives "
    "would tell every client's model"
)

OFFER = (
    "take a method whose server only averages (docs/secure-aggregation.md lists them), or protect the records inside "
    "each client (--dp-record), after which any method is post-processing"
)


def find_sums(algorithm: Algorithm) -> Mapping[str, SumWeighting] | None:
    """Return the sums that a method's server needs; None if it needs single uploads, or answers them one by one."""
    if algorithm.participation.receive == "answer":
        return None
    return find_needed_sums(algorithm.server)


def require_sums(name: str, algorithm: Algorithm) -> Mapping[str, SumWeighting]:
    """Return the sums that a method's server needs.

    Raises:
        ConfigError: the method needs single uploads.
    """
    sums = find_sums(algorithm)
    if sums is None:
        raise ConfigError(
            f"secure-aggregation: {name} compares or mixes the clients' single uploads: {REFUSAL}; {OFFER}"
        )
    return sums


def check_methods(algorithms: Mapping[str, Algorithm], n_nodes: int) -> None:
    """Check that a federation can work under secure aggregation.

    Raises:
        ConfigError: a method needs single uploads, or there are too few or too many nodes.
    """
    if not MIN_NODES <= n_nodes <= MAX_NODES:
        raise ConfigError(
            f"secure-aggregation: got {n_nodes} nodes, expected {MIN_NODES} to {MAX_NODES}: of fewer nodes each knows "
            "the other's part of a sum, and of more every pair would need a key of its own"
        )
    for name, algorithm in algorithms.items():
        require_sums(name, algorithm)


def check_settings(settings: Settings) -> None:
    """Check that no setting of a run needs single uploads at the server.

    Raises:
        ConfigError: one does.
    """
    if names := list_single_upload_options(settings):
        raise ConfigError(
            f"secure-aggregation: {names[0]} needs single uploads, and the server sees none; leave it out"
            + ("" if "where" not in names[0] else ", or choose dp-client-where local")
        )
