"""`fedattune reproduce`: run a study, or list the studies."""

import shlex
from argparse import Namespace

from filelock import FileLock, Timeout

from ..analysis.output.tables import make_console, make_table, print_whole
from ..core.errors import ConfigError, RunError
from ..studies import STUDIES, load_study
from ..studies.study import StudyOptions
from .main import FAILED, INTERRUPTED, print_message
from .options import parse_options


def reproduce(space: Namespace, problems: list[str]) -> int:
    """Train the missing runs of a study, write its table and figure, and print them."""
    from ..experiments.plan import StoppedError
    from ..experiments.runner import make_progress_display
    from ..experiments.session import InterruptHandler
    from ..studies.outcome import StudyResults
    from ..studies.records import Records
    from ..studies.table import print_results, write_results
    from ..studies.train import StudyTrainer

    options = parse_options(StudyOptions, space, problems)
    if space.name is None:
        if options.model_fields_set:
            raise ConfigError("reproduce: give the NAME of a study; without one, the studies are listed")
        _print_studies()
        return 0
    study = load_study(space.name, options.allow_code)
    cells = study.cells(options.cells)
    folder = options.out / study.name
    records = Records(folder)
    command = " ".join(["fedattune reproduce", *_format_command(space.name, options)])
    if options.show and not records.runs:
        raise RunError(f"{folder} holds no results; make them by {command}")
    if records.runs and not (options.resume or options.show):
        raise RunError(
            f"{folder} holds results already; go on with them by --resume, print them by --show, or give another --out"
        )
    failures: list[str] = []
    if not options.show:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {options.out}: {error.strerror or error}; give another folder") from error
        try:
            with (
                FileLock(options.out / "runs.lock", timeout=0),
                InterruptHandler() as stop,
                make_progress_display(quiet=options.quiet) as display,
            ):
                records = Records(folder)  # read again, now that no other command writes them
                failures = StudyTrainer(study, records, options, stop, display).train_cells(cells)
        except Timeout as error:
            raise RunError(
                f"another fedattune reproduce is at work in {options.out}; wait for it, or give another --out"
            ) from error
        except StoppedError as stopped:
            print_message(f"{stopped}; resume with: {command} --resume")
            return INTERRUPTED
    if records.runs:
        write_results(StudyResults(study, records))
        print_results(StudyResults(study, records, cells), len(cells), make_console())
    for failure in failures:
        print_message(f"error: {failure}")
    return FAILED if failures else 0


def _format_command(name: str, options: StudyOptions) -> list[str]:
    """Format the words of this command, to continue with it."""
    words = [shlex.quote(name)]
    for key in sorted(options.model_fields_set - {"resume", "show"}):
        value = getattr(options, key)
        value = ",".join(value) if isinstance(value, tuple) else value
        words += ["--" + key.replace("_", "-")] + ([shlex.quote(str(value))] if value is not True else [])
    return words


def _print_studies() -> None:
    console = make_console()
    table = make_table("study", "what", "runs", "rounds", "data", text_columns=("study", "what", "data"))
    for name in STUDIES:
        study = load_study(name)
        cells = [cell for cell in study.cells() if not study.rows[cell.row].like]
        experiments = [study.make_run(cell, {}, 0).experiment for cell in cells]
        rounds = sorted({one.rounds for one in experiments})
        data = ", ".join(sorted({one.data for one in experiments}))
        searched = sum(len(study.choices(cell)) for cell in cells if len(study.choices(cell)) > 1)
        runs = f"{len(cells) * study.seeds}" + (f" + {searched} shorter" if searched else "")
        table.add_row(name, study.title, runs, " to ".join(map(str, rounds[:: max(1, len(rounds) - 1)])), data)
    print_whole(table, console)
    console.print("Run one by: fedattune reproduce NAME; a part of it by --cells, --rounds and --seeds.", style="dim")
