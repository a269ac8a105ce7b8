"""A worker process whose run waits after a round, so that what a test does then finds all runs in their middle."""

from typing import Any

from fedattune.experiments import pool
from fedattune.experiments.plan import Job, ProgressCallback, ShouldStop
from fedattune.runs.context import Progress

LONGEST_WAIT_S = 120.0


def start_worker(round_: int, gate: Any, *state: Any) -> None:
    """Start as every worker does; its runs tell of the round, and then wait for the gate."""
    pool._start_worker(*state)
    train = Job.train

    def train_and_wait(job: Job, on_progress: ProgressCallback, should_stop: ShouldStop) -> Any:
        def tell(progress: Progress) -> None:
            on_progress(progress)
            if progress.round == round_:
                waited = gate.acquire(timeout=LONGEST_WAIT_S) if gate else pool._state["stop"].wait(LONGEST_WAIT_S)
                assert waited, "nobody came"

        return train(job, tell, should_stop)

    Job.train = train_and_wait  # type: ignore[method-assign]
