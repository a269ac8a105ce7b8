"""What a user should know about a run beside its numbers: sentences that are printed under the table."""

from collections.abc import Sequence

from torch import Tensor

from .clients import ClientStates
from .core import Algorithm, State
from .runs import RoundRecord
from .select import Everything, Norms, Nothing


def run_notes(
    name: str, algorithm: Algorithm, server: State, ids: Tensor, clients: ClientStates
) -> list[str]:
    """What the method has to say, and where this model or cohort is none that it was made for."""
    said = list(algorithm.server.remarks(server, ids))
    personal, n = set(clients.personal), len(clients.fresh)
    if algorithm.personal not in (Nothing(), Everything()) and personal == set(clients.names):
        said.append("all of this model stays on the clients, so nothing is shared: this is training alone")
    if algorithm.personal == Norms() and not personal:
        said.append("this model has no BatchNorm layers, so all of it is shared: this is averaging")
    if algorithm.full_participation and len(ids) < n:
        said.append(
            f"defined for rounds in which all clients take part, but {len(ids)} of {n} did (--cohort)"
        )
    return [*algorithm.notes, *(f"{name}: {one}" for one in said)]


def loss_notes(name: str, records: Sequence[RoundRecord], names: Sequence[str]) -> list[str]:
    """Clients that diverged or dropped out; `names` are the clients'."""
    said = []
    diverged = [record for record in records if record.dropped]
    if diverged:
        who = sorted({i for record in diverged for i in record.dropped})
        listed = ", ".join(names[i] for i in who[:5]) + (", ..." if len(who) > 5 else "")
        said.append(
            f"{name}: in {len(diverged)} of {len(records)} rounds training diverged on clients ({listed}): "
            "they kept the model they had and uploaded nothing; a lower learning rate would help"
        )
    if gone := sum(len(record.absent) for record in records):
        said.append(
            f"{name}: {gone} times a client that was asked dropped out, and its work of that round was lost"
        )
    return said
