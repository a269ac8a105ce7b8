"""Actions of `fedattune deploy` on a written folder: check it, list its nodes, pause, resume or abort its run."""

from argparse import Namespace
from datetime import datetime

from ..core.errors import ConfigError, RunError
from ..deploy import require_flower
from .doctor import print_findings

OFF = "unknown"
"""Text for a time that Flower does not say."""


def act(space: Namespace, problems: list[str]) -> int:
    """Do the action of the command line.

    Args:
        space: the options of the command line, with `action` and `folder`.
        problems: problems with the command line so far.

    Returns:
        The exit code: 1 if the check found something broken.

    Raises:
        ConfigError, RunError: there is no folder, it holds no deployment or no run, or the SuperLink is down.

    """
    given = vars(space).keys() - {"command", "action", "folder", "training_folder", "training_code"}
    if given:
        problems = [
            *problems,
            *(f"unknown option --{one.replace('_', '-')} of deploy {space.action}" for one in sorted(given)),
        ]
    if space.folder is None:
        problems = [*problems, f"give a folder: fedattune deploy {space.action} FOLDER"]
    elif not space.folder.is_dir():
        problems = [*problems, f"{space.folder} is no folder; give the folder that fedattune deploy wrote"]
    if problems:
        raise ConfigError("; ".join(problems))
    require_flower()
    return {"check": _check, "nodes": _print_nodes}.get(space.action, _request)(space)


def _check(space: Namespace) -> int:
    from ..deploy.operate.check import check_kit

    n_broken = len(print_findings(check_kit(space.folder)))
    print(
        f"{n_broken} broken; the lines with -> say what to do."
        if n_broken
        else "The deployment is ready as far as this machine can tell."
    )
    return 1 if n_broken else 0


def _print_nodes(space: Namespace) -> int:
    from ..deploy.operate.kit import list_nodes

    nodes = list_nodes(space.folder)
    if not nodes:
        raise RunError("no node is registered; run ./register.sh")
    for node in nodes:
        print(f"{node.id:<20}  {node.name or '-':<20}  {node.status:<10}  since {_format_time(node.since)}")
    return 0


def _format_time(time: datetime | None) -> str:
    return OFF if time is None else f"{time:%Y-%m-%d %H:%M:%S %Z}".strip()


def _request(space: Namespace) -> int:
    from ..deploy.operate.kit import find_run_folder
    from ..deploy.server.control import write_request

    folder = find_run_folder(space.folder)
    write_request(folder, None if space.action == "resume" else space.action)
    print(
        {
            "pause": f"The run in {folder} ends after its current round, with everything saved; ./run.sh continues it.",
            "abort": f"The run in {folder} ends after its current round, and compares the methods that finished.",
            "resume": f"The run in {folder} has no request to stop; if it has ended, ./run.sh continues it.",
        }[space.action]
    )
    return 0
