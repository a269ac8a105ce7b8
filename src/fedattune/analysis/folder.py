"""Names of the files in a comparison's folder."""

EXPERIMENT_FILE, COMMAND_FILE = "experiment.yaml", "command.txt"
PARTITION_FILE, RESULT_FILE = "partition.json", "result.json"
