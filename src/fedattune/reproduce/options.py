"""What `fedattune reproduce` can be told."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from ..checked import Checked
from ..config import Number
from ..output import Processes


class Reproduction(Checked):
    """Which cells of a study, how much of it, and where results go."""

    cells: str = Field(
        "*", description='only these cells: columns, rows, or "column/row"; * for anything, commas between'
    )
    rounds: Number | None = Field(None, description="at most so many rounds (default: the paper's)")
    mixed_precision: Literal["off", "bfloat16"] | None = Field(
        None, description="matrix products and convolutions of training in this type (default: the study's)"
    )
    seeds: Number | None = Field(None, description="runs of each cell (default: the study's)")
    no_search: bool = Field(False, description="take the middle value of every grid instead of searching it")
    resume: bool = Field(False, description="go on with what is in the folder")
    show: bool = Field(False, description="train nothing: write and print what the stored results say")
    out: Path = Field(Path("results"), description="folder of all studies; each has one of its own in it")
    data_dir: Path | None = Field(
        None, description="folder with the data sets as Parquet, instead of a download"
    )
    processes: Processes = "auto"
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where tensors live")
    quiet: bool = Field(False, description="no progress, only the result")
