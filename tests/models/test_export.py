"""Export models of every method in every format; check the files, the refusals and the command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedattune
from conformance.table import Case, some_methods
from crafted import seal
from fedattune import ConfigError, Federation, Result, RunError
from fedattune.cli import main
from fedattune.core.io import clean_file_name
from fedattune.models import export as exporting
from fedattune.models.export import ExportFormat
from fedattune.models.files import save_model

pytestmark = pytest.mark.usefixtures("unmeasured")

RUN: dict[str, Any] = {"rounds": 2, "cohort": 3, "steps": 2, "batch_size": 16, "lr": 0.1}
SUFFIX: dict[str, str] = {"safetensors": "safetensors", "torch-export": "pt2", "onnx": "onnx"}


class Normed(nn.Module):
    """A network that predicts differently in training: BatchNorm and dropout."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def normed(input_shape: tuple[int, ...], n_classes: int) -> nn.Module:
    return Normed(input_shape[0], n_classes)


class Branching(nn.Linear):
    """A layer that branches on a value in evaluation, which no graph can express."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.training or float(x.sum()) > 0 else out * 1


def fit(name: str, data: Federation, model: Any = "dnn", **more: Any) -> Result:
    hidden = {"hidden": 6} if model == "dnn" else {}
    return fedattune.fit(data, name, model, model_options=hidden, **(RUN | more))


class Words(nn.Module):
    """A part that reads numbers of words, which come as floats."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.embedding = vocabulary, nn.Embedding(vocabulary, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.embedding(x.long()).mean(1)
        return out


class TwoLanguages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Words(500), Words(5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x) + self.second(x)
        return out


def outside(file: Path) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    """Open a file with the libraries of its format alone; return its network and card."""
    if file.suffix == ".pt2":
        extra = {"fedattune.json": ""}
        found = torch.export.load(file, extra_files=extra)
        return found.module(), json.loads(extra["fedattune.json"])
    if file.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        card = session.get_modelmeta().custom_metadata_map["fedattune"]
        return lambda x: torch.from_numpy(session.run(["logits"], {"input": x.numpy()})[0]), json.loads(card)
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        card = opened.metadata()["fedattune"]
    return fedattune.load_model(file, factory=json.loads(card)["model"]), json.loads(card)


def check(result: Result, client: str, data: Federation, kind: ExportFormat, folder: Path) -> None:
    """Check that the file gives the logits of the run's model for any number of samples."""
    file = folder / f"model.{SUFFIX[kind]}"
    written = result.export(client, file, kind)
    assert (written.file, written.format, written.size_bytes) == (file, kind, file.stat().st_size)
    assert list(folder.iterdir()) == [file]
    found, card = outside(file)
    assert (card["client"], card["algorithm"], card["schema"]["classes"]) == (
        client,
        result.algorithm,
        list(data.classes),
    )
    model = result.model(client)
    room = 0.0 if kind == "safetensors" else 1e-5
    assert written.max_difference <= room
    for n in (1, 5, 20):
        x = data.features(torch.arange(n), next(model.parameters()).dtype)
        with torch.no_grad():
            torch.testing.assert_close(found(x), model(x), atol=room, rtol=0)


@some_methods
def test_the_model_of_a_method(case: Case, ragged: Federation, tmp_path: Path) -> None:
    result = fit(case.name, ragged)
    kinds: tuple[ExportFormat, ...] = ("safetensors", "torch-export")
    for kind in kinds:
        (tmp_path / kind).mkdir()
        check(result, "3", ragged, kind, tmp_path / kind)


@pytest.mark.parametrize("name", ["fedrod", "fedam", "fedcp", "fedlc", "knn_per", "feddbe"])
def test_onnx_of_each_network(name: str, ragged: Federation, tmp_path: Path) -> None:
    check(fit(name, ragged), "2", ragged, "onnx", tmp_path)


@pytest.mark.parametrize("kind", SUFFIX)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_batchnorm_and_dropout(dtype: str, kind: ExportFormat, ragged: Federation, tmp_path: Path) -> None:
    """A user's named model is exported in evaluation mode, with its statistics."""
    result = fit("fedbn", ragged, "test_export:normed", dtype=dtype)
    check(result, "1", ragged, kind, tmp_path)
    assert outside(next(tmp_path.iterdir()))[1]["input"].startswith(f"{dtype} (batch, 5)")


class Changed(Normed):
    """The same weights in other code."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = -super().forward(x)
        return found


def test_a_network_whose_code_has_changed_is_refused(ragged: Federation, tmp_path: Path) -> None:
    fit("fedavg", ragged, Normed(5, 3), out=tmp_path / "run")
    read = Result.load(tmp_path / "run")
    with pytest.raises(RunError, match="gives other outputs than when it was trained"):
        read.export("1", tmp_path / "m.safetensors", module=Changed(5, 3))
    read.export("1", tmp_path / "m.safetensors", module=Normed(5, 3))
    fedattune.load_model(tmp_path / "m.safetensors", Normed(5, 3))
    with pytest.raises(RunError, match=r"m\.safetensors: the network Normed gives other outputs"):
        fedattune.load_model(tmp_path / "m.safetensors", Changed(5, 3))


def test_names_of_files_suit_every_system() -> None:
    """Windows has no file CON, whatever its suffix, none with these letters, and none that ends in a dot."""
    names = ["CON", "nul.ward", "Com1", "console", "ward.", 'a<b>c:d"e/f\\g|h?i*j']
    assert [clean_file_name(one) for one in names] == [
        "_CON",
        "_nul.ward",
        "_Com1",
        "console",
        "ward_",
        "a_b_c_d_e_f_g_h_i_j",
    ]
    assert clean_file_name("京" * 200) == "京" * 33  # systems count bytes


def test_what_predicts_otherwise_is_not_left_there(
    ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = fit("fedavg", ragged)
    file = tmp_path / "m.safetensors"
    file.write_text("before")
    monkeypatch.setitem(
        exporting.WRITE_AND_READ, "safetensors", (save_model, lambda _f, model, _c: lambda x: model(x) + 0.1)
    )
    with pytest.raises(RunError, match=r"logits differ by 0\.1.*removed"):
        result.export("0", file)
    monkeypatch.setitem(
        exporting.WRITE_AND_READ, "safetensors", (save_model, lambda _f, model, _c: lambda x: model(x) * torch.nan)
    )
    with pytest.raises(RunError, match="differ by nan"):
        result.export("0", file)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("m.safetensors", "before")]


def test_what_cannot_be_exported(ragged: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = fit("fedavg", ragged, Branching(5, 3), engine="sequential")
    for kind in ("torch-export", "onnx"):
        with pytest.raises(RunError, match=r"cannot be written as a graph.*export it as safetensors"):
            result.export("0", tmp_path / f"m.{SUFFIX[kind]}", kind)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"m\.onnx: a file of the format safetensors ends in \.safetensors"):
        result.export("0", tmp_path / "m.onnx")
    with pytest.raises(ConfigError, match="format: expected safetensors, torch-export, onnx, got 'h5'"):
        result.export("0", tmp_path / "m.h5", "h5")  # type: ignore[arg-type]
    monkeypatch.setattr(exporting, "MAX_ONNX_BYTES", 10)
    with pytest.raises(RunError, match="holds 2 GB; export it as safetensors"):
        result.export("0", tmp_path / "m.onnx", "onnx")
    monkeypatch.setattr(exporting, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'fedattune\[export\]'"):
        result.export("0", tmp_path / "m.onnx", "onnx")


# The command.


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compared") / "o"
    data = ("--data", "digits", "--partition", "iid", "--clients", "3")
    options = ("--algorithms", "fedavg", "--seeds", "2", "--rounds", "2", "--steps", "1", "--lr", "0.1")
    assert main(["compare", *data, *options, "--quiet", "--out", str(out)]) == 0
    return out


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    capsys.readouterr()
    assert main(["export", *map(str, argv)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    return line


def test_the_command(compared: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["export", str(compared), "--client", "1", "--algorithm", "fedavg"]) == 0
    output = capsys.readouterr()
    assert "exporting fedavg, seed 0: as --algorithm says" in output.err
    assert output.out.startswith("1-fedavg-seed0.safetensors: client 1, safetensors, ")
    assert "outputs differ by at most 0\n" in output.out
    assert "\npredict: fedattune predict 1-fedavg-seed0.safetensors --data new.csv\n" in output.out
    model = fedattune.load_model(here / "1-fedavg-seed0.safetensors")
    x = torch.rand(4, 1, 8, 8)
    assert torch.equal(model(x), Result.load(compared / "fedavg" / "seed-0").model("1")(x))
    # The default file is not overwritten.
    assert "exists already" in refused(capsys, compared, "--client", "1", "--algorithm", "fedavg")
    # The suffix names the format, too; another seed.
    argv = ["export", str(compared), "--client", "1", "--algorithm", "local", "--seed", "1", "-o", "m.pt2"]
    assert main(argv) == 0
    output = capsys.readouterr()
    assert "torch.export.load('m.pt2')" in output.out
    found, card = outside(here / "m.pt2")
    assert (card["algorithm"], card["seed"]) == ("local", 1)
    torch.testing.assert_close(found(x), Result.load(compared / "local" / "seed-1").model("1")(x))


def test_all_clients(compared: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = compared / "local" / "seed-1"
    assert main(["export", str(one), "--client", "all"]) == 0
    output = capsys.readouterr()
    assert "exporting local, seed 1: the only method here" in output.err
    files = sorted((here / "all-local-seed1").iterdir())
    assert [file.name for file in files] == [f"000{k}-{k}.safetensors" for k in range(3)]
    assert output.out.count("safetensors, ") == 3
    assert output.out.count("input: ") == 1
    assert "the folder is not empty" in refused(capsys, one, "--client", "all")


def test_bad_input(
    compared: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = compared / "fedavg" / "seed-0"
    assert "--client is missing: name one of 0, 1, 2, or all" in refused(capsys, one)
    assert "no such client (known: 0, 1, 2, or all)" in refused(capsys, one, "--client", "x")
    assert "no run of 'fedavgg'" in refused(capsys, compared, "--client", "1", "--algorithm", "fedavgg")
    assert "no run with seed 9" in refused(capsys, compared, "--client", "1", "--seed", "9")
    assert "--format" in refused(capsys, one, "--client", "1", "--format", "keras")
    got = refused(capsys, one, "--client", "1", "-o", "m.bin")
    assert "m.bin: a file of the format safetensors ends in .safetensors" in got
    got = refused(capsys, one, "--client", "1", "-o", "m.onnx", "--format", "torch-export")
    assert "torch-export ends in .pt2" in got
    got = refused(capsys, one, "--client", "1", "-o", one / "models.safetensors")
    assert "this is a file of the run" in got
    assert "there is no folder" in refused(capsys, one, "--client", "1", "-o", "no/m.onnx")
    assert "holds no run" in refused(capsys, here / "nothing", "--client", "1")
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "find_spec", lambda _: None)
        got = refused(capsys, one, "--client", "1", "--format", "onnx")
    assert "pip install 'fedattune[export]'" in got
    assert list(here.iterdir()) == []


def failed(capsys: pytest.CaptureFixture[str], run: Path) -> str:
    capsys.readouterr()
    assert main(["export", str(run), "--client", "0"]) == 2
    return capsys.readouterr().err


def test_runs_that_cannot_be_exported(ragged: Federation, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit("fedavg", ragged, out="old")
    (here / "old" / "inputs.safetensors").unlink()
    seal(here / "old")
    assert "does not say how inputs are prepared" in failed(capsys, here / "old")
    fit("fedavg", ragged, out="server")
    (here / "server" / "models.safetensors").unlink()
    seal(here / "server")
    assert "each is on its client's node" in failed(capsys, here / "server")
    fit("fedavg", ragged, Normed(5, 3), out="own")
    assert "a Normed of your own" in failed(capsys, here / "own")
    assert not list(here.glob("*.safetensors"))


def test_inputs_are_words_of_every_vocabulary(tmp_path: Path) -> None:
    words = torch.randint(0, 5, (40, 6)).float()
    data = fedattune.federation_from({c: (words, torch.arange(40) % 3) for c in "ab"})
    result = fedattune.fit(data, "fedavg", TwoLanguages(), rounds=1, steps=1)
    result.export("a", tmp_path / "m.safetensors", module=TwoLanguages())
    assert (tmp_path / "m.safetensors").exists()


class OwnTokens(nn.Module):
    """Embedded numbers, of which -1 is the smallest."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x.long() + 1).mean(1))


@pytest.mark.parametrize("is_integer", [True, False])
@pytest.mark.parametrize("kind", ["safetensors", "onnx"])
def test_a_network_may_add_to_token_numbers(is_integer: bool, kind: ExportFormat, tmp_path: Path) -> None:
    words = torch.randint(-1, 5, (40, 6))
    x = words if is_integer else words.float()
    data = fedattune.federation_from({c: (x, torch.arange(40) % 3) for c in "ab"})
    result = fedattune.fit(data, "fedavg", OwnTokens(), rounds=1, steps=1)
    file = tmp_path / f"m{exporting.FORMAT_SUFFIXES[kind]}"
    result.export("a", file, kind, module=OwnTokens())
    assert [*tmp_path.iterdir()] == [file]


class Picky(nn.Module):
    """A model of large numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled() and not self.training and bool((x < 50).any()):
            raise ValueError("too small")
        return self.head(x)


def test_a_network_that_takes_no_drawn_inputs_is_refused(tmp_path: Path) -> None:
    x = 50 + torch.rand(40, 6)
    data = fedattune.federation_from({c: (x, torch.arange(40) % 3) for c in "ab"})
    result = fedattune.fit(data, "fedavg", Picky(), rounds=1, steps=1, engine="sequential")
    with pytest.raises(RunError, match=r"takes neither random inputs nor zeros .* too small; correct its forward"):
        result.export("a", tmp_path / "m.safetensors", module=Picky())
    assert not [*tmp_path.iterdir()]
