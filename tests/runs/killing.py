"""Kill runs at random moments, from a process in which PyTorch is imported once: python killing.py FOLDER."""

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import fedattune
from fedattune.training import loop as rounds
from federations import make_federation

CASES = [  # method, engine, where clients' rows are
    ("fedmcsa", "vectorized", "disk"),
    ("fedmcsa", "sequential", "memory"),
    ("apfl", "vectorized", "memory"),
    ("ditto", "sequential", "disk"),
]
KILLS = 2
DATA = make_federation([14, 20, 31, 41])
RUN = {"rounds": 10, "cohort": 3, "steps": 2, "batch_size": 8, "lr": 0.1, "eval_every": 3}


def start(method: str, engine: str, state: str, out: Path) -> int:
    """A process that trains in `out`, or goes on there; its id."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            fedattune.fit(DATA, method, engine=engine, client_state=state, out=out, resume=True, **RUN)
            code = 0
        finally:
            os._exit(code)
    return child


def check(child: int) -> None:
    if (code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) != 0:
        raise SystemExit(f"a run ended with {code}")


def main(folder: Path) -> None:
    # After every round, so that much of the time goes into them.
    rounds.COMMIT_AFTER_S = 0.0
    rounds.CHECKPOINT_SHARE = 1e9
    for engine in ("sequential", "vectorized"):  # what is imported now need not be imported by every child
        fedattune.fit(DATA, "fedavg", engine=engine, client_state="memory", **RUN | {"rounds": 1})
    luck = random.Random(0)
    for number, case in enumerate(CASES):
        whole, killed = folder / str(number) / "whole", folder / str(number) / "killed"
        begun = time.monotonic()
        check(start(*case, whole))
        took = left = time.monotonic() - begun
        kills = 0
        while kills < KILLS:
            child = start(*case, killed)
            pause = luck.uniform(0, left)
            time.sleep(pause)
            os.kill(child, signal.SIGKILL)
            if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL:
                kills += 1
                left -= pause  # the next process goes on from here, and is done sooner
            else:  # it was faster: nothing is left to kill
                shutil.rmtree(killed)
                left = took
        check(start(*case, killed))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
