"""Names of the files in a comparison's folder."""

EXPERIMENT_FILE, COMMAND_FILE = "experiment.yaml", "command.txt"
PARTITION_FILE, RESULT_FILE = "partition.json", "result.json"
NOTES_FILE = "notes.json"
"""List of sentences on the tuning of a comparison's methods, or on its absence."""

RUN_FOLDERS = "*/seed-*"
"""Pattern of the folders of single runs in the folder of an experiment."""


def make_run_name(method: str, split: int, seed: int) -> str:
    """Return the folder of a run in the folder of its experiment; the first split has none in its name."""
    return f"{method}/seed-{seed}" + (f"-split-{split}" if split else "")
