"""The commands `compare` and `run`: train methods, and print the table, the notes and the verdict."""

from argparse import Namespace

from ..analysis.output.tables import make_console, print_methods
from ..analysis.verdict.notes import select_notes
from ..core.errors import ConfigError
from ..core.lock import lock_folder
from ..core.own_code import list_references
from ..experiments.budget import settle_budget
from ..experiments.output import check_output_files, check_run_folder, choose_run_folder
from ..experiments.plan import StoppedError, make_plan, prepare_command
from ..experiments.session import InterruptHandler, create_run_folder, list_input_files, reopen_run, train_plan
from .main import FAILED, INTERRUPTED, format_resume_command, print_message
from .options import read_experiment


def train(space: Namespace, problems: list[str]) -> int:
    """Train the methods of an experiment, or resume it, and print what was found."""
    command: str = space.command
    experiment, output, overrides = read_experiment(space, problems)
    callbacks = output.make_callbacks()
    out = output.resume or output.out or choose_run_folder(command, experiment.data)
    if output.resume:
        plan, notes = reopen_run(command, out, overrides, output.allow_code)
        experiment = plan.experiment
    else:
        check_run_folder(out, command)
    inputs = list_input_files(experiment, config=output.config, out=out)
    check_output_files({"--json": output.json_file}, inputs)
    if experiment.execution.engine == "ray" and output.processes not in ("auto", 1):
        raise ConfigError(
            f"--processes {output.processes}: with --engine ray, runs follow one another because actors take all "
            "cores; leave it out, or give --ray-actors"
        )
    if not output.resume:
        experiment, notes = prepare_command(command, experiment)
        plan = make_plan(experiment)
        if command == "compare":
            # A file may be that of a run, which holds all options.
            defaults = {key: info.default for key, info in type(experiment).flat_fields().items()}
            given = {key for key in experiment.given if experiment.get(key) != defaults[key]} | overrides.keys()
            plan = settle_budget(plan, given)
        create_run_folder(plan, out, command)
    space.training_folder, space.training_code = out, list_references(plan.experiment.to_keywords())
    try:
        with InterruptHandler() as should_stop, lock_folder(out):
            is_comparison = command == "compare"
            summary = train_plan(plan, out, should_stop, output, is_comparison=is_comparison, callbacks=callbacks)
    except StoppedError as stopped:
        print_message(f"{stopped}; resume with: {format_resume_command(space)}")
        return INTERRUPTED
    console = make_console()
    if summary.rows:
        try:
            print_methods(summary.rows, console, plan.experiment.rounds_to, output.columns)
        except ConfigError as error:  # the verdict must not be lost to a name
            print_methods(summary.rows, console, plan.experiment.rounds_to)
            notes = [*notes, str(error)]
    shown, hidden = [*dict.fromkeys([*notes, *summary.notes])], list[str]()
    if summary.verdict is not None:
        shown, hidden = select_notes(shown)
    for note in shown:
        console.print(f"note: {note}")
    if hidden:
        console.print(f"{len(hidden)} more note{'s' * (len(hidden) > 1)} in the report")
    if summary.verdict is not None:
        console.print(summary.verdict.text, style="bold")
    start = f"The report is {summary.report}; all" if summary.report else "All"
    console.print(f"{start} numbers are in {out}")
    if summary.is_stopped:
        print_message(f"stopped; resume with: {format_resume_command(space)}")
        return INTERRUPTED
    return FAILED if summary.failed else 0
