"""Options of the commands, and the functions that check them."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from ..core.errors import ConfigError
from ..core.options import Count, StrictSchema, describe_errors, option
from ..core.settings import Seed
from .parser import DEFAULT_ALGORITHMS

if TYPE_CHECKING:
    from ..experiments.config import Experiment
    from ..experiments.output import OutputOptions

AnyOptions = TypeVar("AnyOptions", bound=StrictSchema)


class JsonOptions(StrictSchema):
    """Options of `list` and `node audit`."""

    json_: bool = option("print JSON", False, alias="json")


class ShowOptions(StrictSchema):
    """Options of `data show`."""

    picture: Path | None = option("draw the labels of each client to this file (.pdf, .svg, .eps, .png)")
    schema_file: Path | None = option(
        "write to this file the schema that all nodes of a deployment must share", alias="schema"
    )


class DoctorOptions(StrictSchema):
    """Options of `doctor`."""

    json_file: Path | None = option("also write the findings to this file", alias="json")
    quick: bool = option("leave out the training run of a second", False)


class NodeCheckOptions(StrictSchema):
    """Options of `node check`."""

    superlink: str | None = option("address of the server, HOST:PORT, to check the connection")
    certificates: Path | None = option("file of the authority that the node trusts (default: certificates/ca.crt)")
    key: Path | None = option("file of the node's private key (default: keys/node-N)")
    schema_file: Path | None = option("file with the schema of all nodes (default: the schema in app/pyproject.toml)")
    json_: bool = option("print JSON", False, alias="json")


class NodeApproveOptions(StrictSchema):
    """Options of `node approve`."""

    digest: str | None = option("SHA-256 of the text to approve, where nobody can answer a question")


class PrivacyOptions(StrictSchema):
    """Options of `privacy`."""

    level: Literal["client", "record"] = option("what is protected: whole clients, or single training rows", "client")
    target_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = option(
        "epsilon of the whole run, for which the noise is computed"
    )
    noise_multiplier: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = option(
        "noise whose epsilon is computed: its deviation over the clipping norm"
    )
    delta: Annotated[float, Field(gt=0, lt=1)] = option("probability with which epsilon may be exceeded", 1e-5)
    rounds: Count = option("communication rounds", 50)
    clients: Count = option("for clients: number of clients", 100)
    cohort: str = option("for clients: clients per round, a whole number, or a fraction of all (1.0 = all)", "1.0")
    parameters: Count | None = option(
        "for clients: numbers in the model; adds the norm of the noise over that of an update"
    )
    seed: Seed = option("for clients: seed that draws cohorts", 0)
    samples: Count | None = option("for rows: training rows of the client")
    batch_size: Count = option("for rows: expected rows in a mini-batch", 20)
    steps: Count = option("for rows: local steps per round", 20)
    json_: bool = option("print JSON", False, alias="json")


class CiteOptions(StrictSchema):
    """Options of `cite`."""

    algorithms: str | None = option("cite these methods too, or all")


class ReportOptions(StrictSchema):
    """Options of `report`."""

    out: Path | None = option("the HTML file (default: report.html in the first folder)")


class ExplainOptions(StrictSchema):
    """Options of `explain`."""

    algorithm: str | None = option("the method (default: the verdict's if it mixes models, otherwise one that does)")
    seed: Seed | None = option("seed of the run whose mixtures are explained (default: the first)")
    client: str | None = option("name of a client to explain in detail (default: all, in short)")
    json_file: Path | None = option("also write the explanation to this file", alias="json")


class WatchOptions(StrictSchema):
    """Options of `watch`."""

    out: Path | None = option("also write a report to this HTML file, and renew it")
    every: Annotated[float, Field(ge=0.5, le=86_400)] = option("seconds between two updates", 5.0)
    once: bool = option("print the table once, and exit", False)


class TableOptions(StrictSchema):
    """Options of `table`."""

    format_: str | None = option(
        "text, latex (booktabs) and markdown for readers; csv and parquet for programs, one row per "
        "method, seed and split; or file.py:format (default: by the ending of the file, else text)",
        alias="format",
    )
    out: Path | None = option("file for the table (default: standard output)")
    columns: str | None = option(
        "columns: all, or names with commas between (default: few for readers, all for programs)"
    )
    clients: bool = option("for csv and parquet: one row for each client of each run", False)


class PlotOptions(StrictSchema):
    """Options of `plot`."""

    algorithm: str | None = option("show only this method (default: all; for heatmap, one that mixes models)")
    seed: Seed | None = option("show only this seed (default: all; for heatmap, the first)")
    kind: Literal["curves", "heatmap", "clients", "bytes"] = option(
        "accuracy by rounds; who learns from whom; accuracy of clients; bytes by layer", "curves"
    )
    out: Path = option("the figure: .pdf, .svg, .eps or .png", Path("figure.pdf"))
    against: Literal["rounds", "bytes", "seconds"] = option("for curves: the horizontal axis", "rounds")
    round_: Count | None = option("for heatmap: the round (default: the last stored round)", alias="round")
    component: str | None = option("for heatmap: one layer or tensor (default: all)")
    width: Annotated[float, Field(ge=1, le=40)] | None = option("width in inches (default: by the kind)")


FACTORY_HELP = "file.py:factory or package.module:factory of the network, if the network is your own"


class ExportOptions(StrictSchema):
    """Options of `export`."""

    algorithm: str | None = option(
        "the method (default: the verdict's if collaborating helps, local if it does not help, otherwise "
        "the best by validation)"
    )
    seed: Seed | None = option("seed of the run (default: the lowest)")
    client: str | None = option("name of a client, or all")
    format_: Literal["safetensors", "torch-export", "onnx"] = option(
        "format of the file; its model takes prepared inputs and returns logits", "safetensors", alias="format"
    )
    out: Path | None = option("the file; for all clients, a new folder (default: CLIENT-METHOD in this folder)")
    factory: str | None = option(FACTORY_HELP)


class PredictOptions(StrictSchema):
    """Options of `predict`."""

    data: Path | None = option("a table with the columns of training, .csv or .parquet")
    out: Path | None = option("file for the predictions, .csv or .parquet (default: CSV on standard output)")
    factory: str | None = option(FACTORY_HELP)


def validate_options(schema: type[AnyOptions], space: Namespace, problems: list[str]) -> AnyOptions | None:
    """Validate the options of one schema; add wrong values to `problems` and return None if there are any."""
    fields = schema.model_fields
    try:
        return schema(**{fields[key].alias or key: value for key, value in vars(space).items() if key in fields})
    except ValidationError as error:
        problems += describe_errors(error, lambda key: "--" + key.replace("_", "-"))
        return None


def parse_options(schema: type[AnyOptions], space: Namespace, problems: Sequence[str]) -> AnyOptions:
    """Return the checked options of a command; one error reports all that are unknown or wrong."""
    errors = list(problems)
    options = validate_options(schema, space, errors)
    if errors or options is None:
        raise ConfigError("; ".join(errors))
    return options


def read_experiment(space: Namespace, problems: Sequence[str]) -> "tuple[Experiment, OutputOptions, dict[str, Any]]":
    """Read an experiment from the command line and from the file of `--config`.

    Return it with the output options and those of its options that the command line gives.
    """
    from ..experiments.config import Experiment
    from ..experiments.load import collect_errors, load_options, parse_set
    from ..experiments.output import OutputOptions

    errors = list(problems)
    overrides = {key: value for key, value in vars(space).items() if key in Experiment.flat_fields()}
    output = {key: value for key, value in vars(space).items() if key in OutputOptions.model_fields}
    if items := overrides.pop("set", None):
        with collect_errors(errors):
            overrides["set"] = parse_set(items)
    if "resume" in output:
        if {"out", "config"} & output.keys():
            errors.append("--out and --config cannot be given with --resume: a resumed experiment keeps its folder")
        return *load_options(None, output, errors=errors), overrides
    algorithms = DEFAULT_ALGORITHMS.get(space.command)
    defaults = {"algorithms": algorithms} if algorithms else {}
    config = Path(output["config"]) if "config" in output else None
    return *load_options(config, overrides | output, defaults=defaults, errors=errors), overrides
