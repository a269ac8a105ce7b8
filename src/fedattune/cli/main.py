"""Run a command of `fedattune`, and turn errors into one sentence and an exit code."""

import errno
import io
import os
import shlex
import sys
import traceback
from argparse import Namespace
from importlib import import_module
from pathlib import Path

from ..core.errors import ConfigError, FedAttuneError
from ..core.own_code import format_allow_code
from ..core.text import make_printable
from .parser import COMMANDS, parse_arguments

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES)
"""Errors of the system that say that a disk is full, read-only or broken."""


def main(argv: list[str] | None = None) -> int:
    """Run one command, by default that of this process's own command line, and return the exit code.

    0: done. 1: a method of a comparison failed, or FedAttune has a fault. 2: the input is wrong. 130: the user pressed
    Ctrl-C, or SIGTERM stopped a training.
    """
    allow_all_letters()
    # A training command sets the folder that it writes, and the custom code that it runs.
    space = Namespace(command=None, training_folder=None, training_code=())
    try:
        return run_command(argv, space)
    except SystemExit as leaving:  # --help and --version
        return int(leaving.code or 0)
    except KeyboardInterrupt:
        resume = f"; resume with: {format_resume_command(space)}" if space.training_folder else ""
        print_message(f"interrupted{resume}")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has left, as in `fedattune list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (FedAttuneError, OSError) as error:
        resume = ""
        if space.training_folder and getattr(error, "errno", None) in OF_THE_DISK:
            resume = f"; finished rounds are kept; when that is fixed, resume with: {format_resume_command(space)}"
        print_message(f"error: {error}{resume}")
    except MemoryError as error:
        print_message(f"error: there is not enough memory ({error}); give fewer clients, or smaller data or models")
    except Exception as error:
        _report_fault(error, space.training_folder)
        return FAILED
    return BAD_INPUT


def allow_all_letters() -> None:
    """Let letters that the terminal does not know become question marks: Windows' pipes know a few hundred."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def run_command(argv: list[str] | None, space: Namespace) -> int:
    """Parse the command line into `space`, and call the function of the command."""
    _, problems = parse_arguments(argv, space)
    command = COMMANDS[space.command]
    if command.commands:
        command = command.commands[space.action]
    if problems and not command.options:
        raise ConfigError("; ".join(problems))
    module, _, function = command.function.partition(":")
    return int(getattr(import_module(f".{module}", __package__), function or module)(space, problems))


def print_message(sentence: str) -> None:
    """Print a message as one line on standard error."""
    print("fedattune: " + make_printable(" ".join(sentence.split())), file=sys.stderr, flush=True)


def print_content(text: str) -> None:
    """Print what could be the content of a file: exactly as it is, but on a terminal without codes that steer it."""
    print(make_printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def format_resume_command(space: Namespace) -> str:
    """Return the command line that resumes an interrupted training."""
    words = [f"fedattune {space.command} --resume {shlex.quote(str(space.training_folder))}"]
    return " ".join([*words, *filter(None, [format_allow_code(space.training_code)])])


def _report_fault(error: Exception, folder: Path | None) -> None:
    """Print a fault of FedAttune in one line; write the traceback to the folder if there is one."""
    text = "".join(traceback.format_exception(error))
    advice = "set FEDATTUNE_DEBUG=1 to see where"
    if os.environ.get("FEDATTUNE_DEBUG") == "1":
        print(text, file=sys.stderr, end="")
    elif folder and folder.is_dir():
        (folder / "error.log").write_text(text, encoding="utf-8")
        advice = f"the details are in {folder / 'error.log'}"
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    print_message(f"internal error: {type(error).__name__}: {error}{notes}; {advice}")
