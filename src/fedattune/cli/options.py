"""What the commands can be told that look at finished or running runs."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from ..core.errors import ConfigError
from ..core.options import Count, StrictSchema, describe_errors
from ..core.settings import Seed

if TYPE_CHECKING:
    from ..experiments.config import Experiment
    from ..experiments.output import OutputOptions

AnyOptions = TypeVar("AnyOptions", bound=StrictSchema)


class RunChoice(StrictSchema):
    """Which of the runs in a folder."""

    algorithm: str | None = Field(
        None, description="the method (default: the verdict's; of one method, that one)"
    )
    seed: Seed | None = Field(
        None, description="the seed (default: the first one where one run is shown, else all)"
    )


class ReportOptions(StrictSchema):
    """Where the report goes."""

    out: Path | None = Field(None, description="the HTML file (default: report.html in the first folder)")


class ExplainOptions(RunChoice):
    """Whom to explain."""

    algorithm: str | None = Field(
        None,
        description="the method (default: the verdict's if it mixes clients' models, else one that does)",
    )
    client: str | None = Field(None, description="a client by its name (default: all, in short)")
    json_file: Path | None = Field(None, alias="json", description="also write what is said to this file")


class WatchOptions(ReportOptions):
    """How often to look."""

    every: Annotated[float, Field(ge=0.5, le=86_400)] = Field(5.0, description="seconds between two looks")
    once: bool = Field(False, description="look once, and leave")


class PlotOptions(RunChoice):
    """What to draw."""

    algorithm: str | None = Field(
        None, description="only this method (default: all; of heatmap, one that mixes clients' models)"
    )
    kind: Literal["curves", "heatmap", "clients", "bytes"] = Field(
        "curves",
        description="accuracy by rounds; who learns from whom; accuracy of clients; bytes by layer",
    )
    out: Path = Field(Path("figure.pdf"), description="the figure: .pdf, .svg, .eps or .png")
    against: Literal["rounds", "bytes", "seconds"] = Field(
        "rounds", description="of curves: what is along the horizontal axis"
    )
    round_: Count | None = Field(
        None, alias="round", description="of heatmap: the round (default: the last one stored)"
    )
    component: str | None = Field(None, description="of heatmap: one layer or tensor (default: all)")
    width: Annotated[float, Field(ge=1, le=40)] | None = Field(
        None, description="inches (default: by the kind)"
    )


class ExportOptions(RunChoice):
    """Which model, and in which form."""

    client: str | None = Field(None, description="a client by its name, or all")
    format_: Literal["safetensors", "torch-export", "onnx"] = Field(
        "safetensors",
        alias="format",
        description="how the model is written; it takes prepared inputs and gives logits",
    )
    out: Path | None = Field(
        None, description="the file, of all clients a new folder (default: CLIENT-METHOD in this folder)"
    )


class PredictOptions(StrictSchema):
    """What to predict for."""

    data: Path | None = Field(None, description="a table with the columns of training, .csv or .parquet")
    out: Path | None = Field(
        None, description="the predictions as .csv or .parquet (default: CSV to standard output)"
    )
    factory: str | None = Field(
        None,
        description="package.module:factory of your own network, where the model was trained by that name",
    )


def parse_options(schema: type[AnyOptions], space: Namespace, problems: Sequence[str]) -> AnyOptions:
    """The options of a command, checked.

    Raises:
        ConfigError: options that are not known, or values that cannot be, all in one sentence.

    """
    fields = schema.model_fields
    given = {fields[key].alias or key: value for key, value in vars(space).items() if key in fields}
    found = list(problems)
    try:
        options = schema(**given)
    except ValidationError as error:
        found += describe_errors(error, lambda key: "--" + key.replace("_", "-"))
    if found:
        raise ConfigError("; ".join(found))
    return options


def read_experiment(
    space: Namespace, problems: Sequence[str], defaults: Mapping[str, Any]
) -> "tuple[Experiment, OutputOptions, dict[str, Any]]":
    """Read an experiment from the command line and from the file of `--config`.

    Args:
        space: the parsed arguments.
        problems: problems with the arguments, to be reported with all others.
        defaults: defaults of this command.

    Returns:
        The experiment, the output options, and the options of the experiment that the command line gives.

    Raises:
        ConfigError: options are unknown, or values are wrong; one message reports them all.

    """
    from ..experiments.config import Experiment
    from ..experiments.load import load_options, parse_set
    from ..experiments.output import OutputOptions

    found = list(problems)
    given = {key: value for key, value in vars(space).items() if key in Experiment.model_fields}
    output = {key: value for key, value in vars(space).items() if key in OutputOptions.model_fields}
    if "set" in given:
        try:
            given["set"] = parse_set(given["set"])
        except ConfigError as error:
            found.append(str(error))
            del given["set"]
    if "resume" in output:
        if {"out", "config"} & output.keys():
            found.append("--out and --config cannot be given with --resume, which goes on in its own folder")
        return *load_options(None, output, errors=found), given
    config = Path(output["config"]) if "config" in output else None
    return *load_options(config, given | output, defaults=defaults, errors=found), given
