"""Check what secure aggregation needs: methods and settings of a run, keys and roster of a node."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.algorithm import Algorithm, SumWeighting, find_needed_sums
from ...core.checks import NODE_CHECKS, Finding, broken, note
from ...core.errors import ConfigError
from ...core.settings import Settings
from ...training.uploads.pipeline import list_single_upload_options
from . import MAX_NODES, MIN_NODES, count_threshold

if TYPE_CHECKING:
    from ..node.policy import NodePolicy

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
    """Return the sums that a method's server needs, or raise `ConfigError` if it needs single uploads."""
    sums = find_sums(algorithm)
    if sums is None:
        raise ConfigError(
            f"secure-aggregation: {name} compares or mixes the clients' single uploads: {REFUSAL}; {OFFER}"
        )
    return sums


def find_weightings(name: str, algorithm: Algorithm, settings: Settings) -> dict[str, SumWeighting]:
    """Return the weighting of each sum of a run, that of averaged BatchNorm statistics as `buffers`.

    With differential privacy of clients every client counts 1: a sample count is a number about one client's data.
    """
    sums: dict[str, SumWeighting] = {**require_sums(name, algorithm), "buffers": "samples"}
    if settings.privacy.client is None:
        return sums
    return {part: "uniform" if weighting == "samples" else weighting for part, weighting in sums.items()}


def check_run(algorithms: Mapping[str, Algorithm], n_nodes: int, settings: Settings) -> None:
    """Check that neither a method nor a setting of a run needs single uploads, and that its nodes are neither too few
    nor too many.
    """
    if not MIN_NODES <= n_nodes <= MAX_NODES:
        raise ConfigError(
            f"secure-aggregation: got {n_nodes} nodes, expected {MIN_NODES} to {MAX_NODES}: of fewer nodes each knows "
            "the other's part of a sum, and of more every pair would need a key of its own"
        )
    for name, algorithm in algorithms.items():
        require_sums(name, algorithm)
    if names := list_single_upload_options(settings):
        raise ConfigError(
            f"secure-aggregation: {names[0]} needs single uploads, and the server sees none; leave it out"
            + ("" if "where" not in names[0] else ", or choose dp-client-where local")
        )


def check_secure_node(policy: "NodePolicy", base: Path, run: Mapping[str, Any]) -> Iterator[Finding]:
    """Check a node's rules for secure aggregation, its key and its roster.

    Args:
        base: the folder to which its paths are relative.
        run: configuration of the deployment's run; empty if there is no copy of the app.
    """
    from . import keys
    from .session import count_tolerated

    name, is_required = "secure aggregation", policy.secure_aggregation == "required"
    is_asked = bool(run.get("secure-aggregation"))
    if run and not is_asked:
        if is_required:
            found = "this node takes part in secure sums only, and the run of this deployment makes none"
            yield broken(name, found, "ask the server's operators for a run with --secure-aggregation")
        return
    if not is_required and not is_asked:
        return
    if not is_required:
        found = "the run uses it, and the server can switch it off"
        yield note(name, found, 'write secure-aggregation = "required" into the node\'s configuration')
    if policy.key is None or policy.roster is None:
        found = "the node's configuration names no `key` or no `roster`"
        yield broken(name, found, 'write key = "keys/node-N" and roster = "nodes/roster.pub"')
        return
    try:
        roster = keys.read_roster(base / policy.roster)
        own = keys.make_id(keys.load_node_key(base / policy.key).public_key())
    except ConfigError as error:
        yield broken(name, str(error), "correct this file")
        return
    n = len(roster)
    if own not in roster:
        found = f"the key {policy.key} is not in {policy.roster}"
        yield broken(name, found, "add the line of its .pub, here and at all other nodes")
    elif n > MAX_NODES or n < policy.min_participants:
        found = f"{policy.roster} has {n} nodes, expected {policy.min_participants} to {MAX_NODES}"
        yield broken(name, found, "fix the roster, or `min-participants`")
    else:
        threshold = max(count_threshold(policy.threshold, n), policy.min_participants)
        digest = keys.hash_text(*(id_.encode() for id_ in sorted(roster)))
        found = (
            f"{n} nodes in the roster ({', '.join(one.name for one in roster.values())}), SHA-256 {digest[:16]}; a sum "
            f"of all needs {threshold} of them, and survives the loss of {n - threshold}; a lying server and "
            f"{count_tolerated(policy.threshold, n, policy.min_participants)} of them learn sums over the others only"
        )
        yield Finding(name, "ok", found, "compare the SHA-256 with the other operators on the phone")


NODE_CHECKS.append(check_secure_node)
