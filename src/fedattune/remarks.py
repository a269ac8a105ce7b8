"""What a user should know about a run beside its numbers: sentences that are printed under the table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .cohorts import cohort
from .runs import RoundRecord
from .select import Everything, Norms, Nothing

if TYPE_CHECKING:
    from .rounds import Run


def run_notes(run: "Run") -> list[str]:
    """What the method has to say, where model or cohort are none that it was made for, and who was lost."""
    name, algorithm, records = run.config["algorithm"], run.algorithm, run.store.rounds()
    ids = cohort(run.settings, len(run.everyone), run.record.round).to(run.everyone.device)
    said = list(algorithm.server.remarks(run.server, ids))
    personal = set(run.clients.personal)
    if algorithm.personal not in (Nothing(), Everything()) and personal == set(run.clients.names):
        said.append("all of this model stays on the clients, so nothing is shared: this is training alone")
    if algorithm.personal == Norms() and not personal:
        said.append("this model has no BatchNorm layers, so all of it is shared")
    some = len(ids) < len(run.everyone) or any(record.absent for record in records)
    if algorithm.full_participation and some:
        said.append("defined for rounds in which all clients take part, which was not so here")
    return [
        *algorithm.notes,
        *(f"{name}: {one}" for one in said),
        *_lost(name, records, run.federation.names),
        *_of_all_methods(run, records),
    ]


def _lost(name: str, records: Sequence[RoundRecord], names: Sequence[str]) -> list[str]:
    """Clients that diverged; `names` are the clients'."""
    diverged = [record for record in records if record.dropped]
    if not diverged:
        return []
    who = sorted({i for record in diverged for i in record.dropped})
    listed = ", ".join(names[i] for i in who[:5]) + (", ..." if len(who) > 5 else "")
    return [
        f"{name}: in {len(diverged)} of {len(records)} rounds training diverged on clients ({listed}): "
        "they kept the model they had and uploaded nothing; a lower learning rate would help"
    ]


def _of_all_methods(run: "Run", records: Sequence[RoundRecord]) -> list[str]:
    """What is the same for every method of a comparison, and so is said without a name."""
    said = []
    if any(record.absent for record in records):
        said.append(
            "clients that were asked dropped out (--drop-out): their work of these rounds was lost; local, which is "
            "asked for nothing, loses none"
        )
    wanted = run.settings.bn_affine == "local" or run.settings.bn_buffers == "average"
    if wanted and not run.task.bn_statistics:
        said.append("this model has no BatchNorm layers: --bn-affine and --bn-buffers change nothing")
    return said
