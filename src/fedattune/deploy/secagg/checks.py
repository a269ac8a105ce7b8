"""Check a node's configuration of secure aggregation, for `fedattune node check`."""

from collections.abc import Iterator
from pathlib import Path

from ...core.checks import Finding, broken, note
from ...core.errors import ConfigError
from ..node.policy import NodePolicy
from . import keys
from .methods import MAX_NODES
from .session import count_threshold

NAME = "secure aggregation"


def check_secure_node(policy: NodePolicy, base: Path, *, is_asked: bool | None) -> Iterator[Finding]:
    """Check a node's rules for secure aggregation, its key and its roster.

    Args:
        policy: the node's rules.
        base: the folder to which paths are relative.
        is_asked: whether the run of the deployment uses secure aggregation; None if there is no copy of the app.

    """
    is_required = policy.secure_aggregation == "required"
    if is_asked is False:
        if is_required:
            found = "this node takes part in secure sums only, and the run of this deployment makes none"
            yield broken(NAME, found, "ask the server's operators for a run with --secure-aggregation")
        return
    if not is_required and not is_asked:
        return
    if not is_required:
        found = "the run uses it, and the server can switch it off"
        yield note(NAME, found, 'write secure-aggregation = "required" into the node\'s configuration')
    if policy.key is None or policy.roster is None:
        found = "the node's configuration names no `key` or no `roster`"
        advice = 'write key = "keys/node-N" and roster = "nodes/roster.pub"'
        yield broken(NAME, found, advice)
        return
    try:
        roster = keys.read_roster(base / policy.roster)
        own = keys.make_id(keys.load_node_key(base / policy.key).public_key())
    except ConfigError as error:
        yield broken(NAME, str(error), "correct this file")
        return
    n = len(roster)
    if own not in roster:
        found = f"the key {policy.key} is not in {policy.roster}"
        yield broken(NAME, found, "add the line of its .pub, here and at all other nodes")
        return
    if n > MAX_NODES or n < policy.min_participants:
        found = f"{policy.roster} has {n} nodes, expected {policy.min_participants} to {MAX_NODES}"
        yield broken(NAME, found, "fix the roster, or `min-participants`")
        return
    threshold = max(count_threshold(policy.threshold, n), policy.min_participants)
    digest = keys.hash_text(*(id_.encode() for id_ in sorted(roster)))
    found = (
        f"{n} nodes in the roster ({', '.join(one.name for one in roster.values())}), SHA-256 {digest[:16]}; a sum of "
        f"all needs {threshold} of them, and survives the loss of {n - threshold}"
    )
    yield Finding(NAME, "ok", found, "compare the SHA-256 with the other operators on the phone")
