"""Tell which methods can work under secure aggregation, and why the others cannot."""

from collections.abc import Mapping

from ...core.algorithm import Algorithm, SumWeighting, find_needed_sums
from ...core.errors import ConfigError
from ...core.settings import Settings

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
    """Check that no setting of a run needs single uploads at the server."""
    if settings.privacy.client is not None and settings.privacy.client.where == "central":
        raise ConfigError(
            "secure-aggregation: dp-client-where central clips and noises single uploads at the server, which sees "
            "none; choose dp-client-where local"
        )
    given = {"robust": settings.defence.robust != "off", "max-share": settings.defence.max_share is not None}
    if settings.uploads.compress is not None:
        raise ConfigError(
            "secure-aggregation: compress sends codes of single uploads, which have no sum under masks; leave it out"
        )
    for key, is_given in given.items():
        if is_given:
            raise ConfigError(
                f"secure-aggregation: {key} compares single uploads, and the server sees none; leave it out"
            )
