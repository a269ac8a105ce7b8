"""Pretrained networks: what is trained, mixed, sent and saved; texts, images and numbers; files and predictions."""

import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model, RobertaConfig, RobertaModel

import fedattune
from fedattune import ConfigError, Federation, ModelError, Result
from fedattune.cli import main
from fedattune.core.params import find_layer
from fedattune.core.selectors import Head
from fedattune.core.task import Task
from fedattune.data.tables import texts as reading
from fedattune.models import build_model
from fedattune.models.pretrained import FrozenBatchNorm, ImageNetwork, TextNetwork
from fedattune.runs.folder import set_checksums
from models.pretrained_files import IMAGE_CONFIGS, TEXT_CONFIGS, make_network, write_texts

RUN: dict[str, Any] = {"rounds": 2, "steps": 2, "batch_size": 8, "lr": 0.1}


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("networks")
    return {kind: make_network(folder / kind, kind) for kind in (*TEXT_CONFIGS, *IMAGE_CONFIGS)}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.csv")


def load(table: Path, tokenizer: str, target: str = "label") -> Federation:
    options = {"tokens": tokenizer, "max_tokens": 8, "features": "text"}
    return fedattune.load_federation(table, client_column="client", target=target, options=options)


@pytest.fixture(scope="module")
def texts(table: Path, networks: dict[str, str]) -> Federation:
    return load(table, networks["bert"])


@pytest.fixture(scope="module")
def images() -> Federation:
    generator = torch.Generator().manual_seed(0)
    return fedattune.federation_from(
        [(torch.rand(24, 1, 6, 6, generator=generator), torch.arange(24) % 3) for _ in range(3)]
    )


def make(data: Federation, name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return build_model("hf", data.input_shape, data.n_outputs, {"id": name, **options})


def test_lora_trains_adapters_and_the_head_alone(texts: Federation, networks: dict[str, str]) -> None:
    model = make(texts, networks["bert"], rank=2)
    task = Task(model)
    layers = {find_layer(name) for name in task.params}
    assert layers == {
        *(f"pretrained.bert.encoder.layer.{i}.attention.self.{one}" for i in (0, 1) for one in ("query", "value")),
        "pretrained.classifier",
    }  # fmt: skip
    assert task.params.numel() == 4 * 2 * 2 * 8 + 2 * 8 + 2
    assert not task.buffers  # position ids are constants
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = fedattune.fit(texts, "fedavg", model, **RUN)
    after = result.model(0).state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed <= set(task.params)
    # The matrices A hardly move in four steps, because the matrices B begin at zero.
    assert changed >= {name for name in task.params if "lora_A" not in name}


def test_head_and_all(texts: Federation, networks: dict[str, str]) -> None:
    head = make(texts, networks["distilbert"], tuning="head")
    assert {find_layer(name) for name in Task(head).params} == {"pretrained.pre_classifier", "pretrained.classifier"}
    assert Head().names(head) == ("pretrained.classifier.weight", "pretrained.classifier.bias")
    everything = make(texts, networks["bert"], tuning="all")
    assert Task(everything).params.numel() > 1000
    with pytest.raises(ConfigError, match="targets go with tuning=lora"):
        make(texts, networks["bert"], tuning="all", targets="query")


def test_targets_are_chosen_by_the_end_of_their_names(texts: Federation, networks: dict[str, str]) -> None:
    task = Task(make(texts, networks["distilbert"], targets="q_lin, 1.ffn.lin1"))
    adapters = {find_layer(name).rpartition("layer.")[2] for name in task.params if "lora_" in name}
    assert adapters == {"0.attention.q_lin", "1.attention.q_lin", "1.ffn.lin1"}
    with pytest.raises(ConfigError, match="no layer ends in nothing; the network has k_lin, lin1"):
        make(texts, networks["distilbert"], targets="nothing")


@pytest.mark.parametrize("unit", ["layer", "tensor"])
def test_fedmcsa_has_one_matrix_per_adapter(unit: str, texts: Federation, networks: dict[str, str]) -> None:
    options = {"id": networks["bert"]}
    result = fedattune.fit(texts, "fedmcsa", "hf", options={"unit": unit}, model_options=options, **RUN)
    components = [name for name in result.mixing.last() if "classifier" not in name]
    assert components == [
        f"pretrained.bert.encoder.layer.{i}.attention.self.{one}" for i in (0, 1) for one in ("query", "value")
    ]  # fmt: skip
    assert result.mixing.last()[components[0]].shape == (4, 4)


@pytest.mark.parametrize("kind", TEXT_CONFIGS)
def test_engines_agree(kind: str, texts: Federation, networks: dict[str, str]) -> None:
    options = {"id": networks[kind], "dropout": 0.0}
    engines: tuple[Any, ...] = ("sequential", "auto", "vectorized")
    runs = [
        fedattune.fit(texts, "fedavg", "hf", model_options=options, engine=engine, dtype="float64", **RUN)
        for engine in engines
    ]
    for run in runs[1:]:
        for name, value in runs[0].models.items():
            torch.testing.assert_close(value, run.models[name], rtol=0, atol=1e-10)  # rounding of float64


def test_only_trained_weights_are_sent_and_saved(texts: Federation, networks: dict[str, str], tmp_path: Path) -> None:
    options = {"id": networks["bert"]}
    result = fedattune.fit(texts, "fedavg", "hf", model_options=options, out=tmp_path / "run", **RUN)
    trained = Task(make(texts, networks["bert"])).params
    assert result.n_parameters == trained.numel()
    assert result.bytes_up == RUN["rounds"] * texts.n_clients * trained.nbytes()
    from safetensors import safe_open

    files = result.save_models(tmp_path / "models")
    for file in (*files, tmp_path / "run" / "models.safetensors"):
        with safe_open(file, "pt") as opened:
            assert {key.removeprefix("params/") for key in opened.keys()} == set(trained)  # noqa: SIM118
    again = fedattune.load_model(files[0])
    x = texts.features(torch.arange(5))
    with torch.no_grad():
        assert torch.equal(again(x), result.model(0)(x))
        assert torch.equal(Result.load(tmp_path / "run").model(0)(x), again(x))


@pytest.mark.parametrize("kind", ["safetensors", "onnx", "torch-export"])
def test_exports_predict_the_same(
    kind: Any, table: Path, texts: Federation, networks: dict[str, str], tmp_path: Path
) -> None:
    result = fedattune.fit(texts, "fedavg", "hf", model_options={"id": networks["bert"]}, **RUN)
    suffix = {"torch-export": "pt2"}.get(kind, kind)
    file = tmp_path / f"model.{suffix}"
    written = result.export(0, file, kind)
    assert written.max_difference <= 1e-6  # other order of sums
    assert "token numbers of the text 'text'" in written.input
    if kind == "torch-export":
        return
    predictions = fedattune.predict(file, table)
    with torch.no_grad():
        expected = result.model(0)(texts.x).softmax(1)
    torch.testing.assert_close(torch.from_numpy(predictions.probabilities), expected, rtol=0, atol=1e-6)
    assert predictions.n_known == len(texts.y)


@pytest.mark.parametrize("tuning", ["lora", "head", "all"])
@pytest.mark.parametrize("kind", IMAGE_CONFIGS)
def test_images(kind: str, tuning: str, images: Federation, networks: dict[str, str], tmp_path: Path) -> None:
    """Grey images of 6x6 become the three channels and the size that the network wants."""
    options = {"id": networks[kind], "tuning": tuning}
    result = fedattune.fit(images, "fedmcsa", "hf", model_options=options, **RUN)
    model = result.model("0")
    assert isinstance(model, ImageNetwork)
    assert model.size == ((8, 8) if kind == "vit" else (6, 6))
    norms = [one for one in model.modules() if isinstance(one, FrozenBatchNorm)]
    assert bool(norms) == (kind == "resnet" and tuning != "all")
    assert bool(result.buffers) == (kind == "resnet" and tuning == "all")
    result.export("0", tmp_path / "model.safetensors")


def test_pixels_are_normalised_as_the_network_says(
    images: Federation, networks: dict[str, str], tmp_path: Path
) -> None:
    folder = make_network(tmp_path / "vit", "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text(
        '{"image_mean": [0.25, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "image_processor_type": "ViTImageProcessor"}'
    )
    seen = []
    for pixels, x in (("unit", 0.75), ("half", 0.5)):
        model = make(images, folder, pixels=pixels)
        assert isinstance(model, ImageNetwork)
        model.pretrained.register_forward_pre_hook(
            lambda _, __, given: seen.append(given["pixel_values"]), with_kwargs=True
        )
        model(torch.full((1, 1, 6, 6), x))
    for pixel_values in seen:
        assert pixel_values[0, :, 0, 0].tolist() == pytest.approx([1.0, 0.5, 0.5])
    model = make(images, folder)
    assert isinstance(model, ImageNetwork)
    with pytest.raises(ModelError, match=r"values from -1 to -1, expected 0 to 1; scale them"):
        model.check_inputs(torch.full((1, 1, 6, 6), -1.0))
    with pytest.raises(ModelError, match="images of 2 channels, and the network takes 3"):
        build_model("hf", (2, 8, 8), 3, {"id": folder})


def test_missing_tokens_do_not_count(texts: Federation, networks: dict[str, str]) -> None:
    """The mask follows from the tokens: more padding changes nothing, in either form of the mask."""
    for kind in TEXT_CONFIGS:
        model = make(texts, networks[kind]).eval()
        assert isinstance(model, TextNetwork)
        assert model.has_square_mask == (kind != "gpt2")  # a causal network looks back only
        x = torch.tensor([[2.0, 6, 3], [4, 8, -1]])
        longer = torch.cat([x, torch.full((2, 3), -1.0)], 1)
        with torch.no_grad():
            torch.testing.assert_close(model(x), model(longer), rtol=0, atol=1e-6)


def test_wrong_inputs_are_explained(table: Path, texts: Federation, networks: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"give --set hf\.id=ID_OR_FOLDER"):
        fedattune.fit(texts, "fedavg", "hf")
    with pytest.raises(ModelError, match=r"missing' cannot be loaded for texts .*; give an id"):
        make(texts, str(tmp_path / "missing"))
    hashed = fedattune.load_federation(
        table,
        client_column="client",
        target="label",
        options={"features": "text", "text_columns": "text", "text_features": 10},
    )
    with pytest.raises(ModelError, match="got fractions, expected token numbers"):
        fedattune.fit(hashed, "fedavg", "hf", model_options={"id": networks["bert"]})
    with pytest.raises(ModelError, match="at most 12 tokens"):
        build_model("hf", (13,), 2, {"id": networks["bert"]})
    letters = load(table, "characters")
    with pytest.raises(ModelError, match="but the network knows 12 tokens; give the network's own tokenizer"):
        fedattune.fit(letters, "fedavg", "hf", model_options={"id": networks["bert"]})
    with pytest.raises(ModelError, match="expected token numbers"):
        build_model("hf", (3, 4), 2, {"id": networks["bert"]})


def test_missing_packages_are_named(
    texts: Federation, networks: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(reading, "find_spec", lambda name: None if name == "peft" else found(name))
    with pytest.raises(ConfigError, match=r"the model hf needs peft: pip install 'fedattune\[hf\]'"):
        make(texts, networks["bert"])
    make(texts, networks["bert"], tuning="head")
    monkeypatch.setattr(reading, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="needs transformers and peft"):
        make(texts, networks["bert"])


def test_the_command_line_from_texts_to_predictions(
    table: Path, networks: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model = tmp_path / "run", tmp_path / "model.safetensors"
    sets = {"table.tokens": networks["bert"], "table.max_tokens": 8, "hf.id": networks["bert"], "hf.rank": 2}
    flags = {
        "data": table, "client-column": "client", "target": "label", "drop-columns": "score", "out": run,
        "model": "hf", "algorithm": "fedmcsa", "rounds": 2, "steps": 2,
    }  # fmt: skip
    words = [str(part) for key, value in flags.items() for part in (f"--{key}", value)]
    options = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    assert main(["run", *words, *options]) == 0
    assert "is read as at most 8 tokens" in capsys.readouterr().out
    assert main(["export", str(run), "--client", "sport-0", "--out", str(model)]) == 0
    assert model.stat().st_size < 10_000
    capsys.readouterr()
    assert main(["predict", str(model), "--data", str(table)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4 * 24 + 1


def test_a_folder_that_is_older_than_optimizers_is_resumed(
    table: Path, networks: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    sets = {"table.tokens": networks["bert"], "table.max_tokens": 8, "hf.id": networks["bert"]}
    options = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    words = ["--data", str(table), "--client-column", "client", "--target", "label", "--drop-columns", "score"]
    words += ["--model", "hf", "--algorithm", "fedavg", "--rounds", "1", "--steps", "1", "--optimizer", "sgd"]
    assert main(["run", *words, *options, "--out", str(out)]) == 0
    file = out / "experiment.yaml"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if not line.startswith(("optimizer", "momentum"))))
    next(out.rglob("result.json")).unlink()  # as if it was stopped
    set_checksums(out, [file])
    assert main(["run", "--resume", str(out)]) == 0, capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:'click:DeprecationWarning")  # Flower's
def test_a_deployment_carries_the_tokens_in_its_schema(table: Path, networks: dict[str, str], tmp_path: Path) -> None:
    from fedattune.deploy.node.node import NodeRuntime
    from fedattune.training.backends.message import WorkerMessage

    kit = tmp_path / "kit"
    sets = {"table.tokens": networks["bert"], "table.max_tokens": 8, "hf.id": networks["bert"]}
    options = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    words = ["--data", str(table), "--client-column", "client", "--target", "label", "--drop-columns", "score"]
    assert (
        main(["deploy", "write", *words, *options, "--model", "hf", "--algorithms", "fedavg", "--out", str(kit)]) == 0
    )
    config = tomllib.loads((kit / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config["set"] == f"hf.id={networks['bert']}"
    node = tomllib.loads((kit / "nodes" / "0.toml").read_text())
    runtime = NodeRuntime({"data": str(kit / node["data"]), "state": str(tmp_path / "state")}, config)
    assert runtime.answer(WorkerMessage({"kind": "hello"})).head["kind"] == "hello"
    assert runtime.schema.tokens == {"text": networks["bert"]}
    assert runtime.federation.input_shape == (8,)


def test_the_texts_are_those_that_the_script_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.syspath_prepend(str(examples))
    import make_texts

    make_texts.write(tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == (examples / "texts.csv").read_bytes()


def test_clients_train_by_adamw_unless_told_otherwise(texts: Federation, networks: dict[str, str]) -> None:
    """At a rate that suits the weights that are trained; a method with steps of its own keeps SGD."""
    usual = {key: value for key, value in RUN.items() if key != "lr"}

    def settings(method: str = "fedavg", tuning: str = "lora", **more: Any) -> tuple[str, float]:
        options = {"id": networks["bert"], "tuning": tuning}
        training = fedattune.fit(texts, method, "hf", model_options=options, **{**usual, **more}).settings.training
        return training.optimizer, training.lr

    assert settings() == ("adamw", 0.001)
    assert settings(tuning="all") == ("adamw", 0.00005)
    assert settings(lr=0.003) == ("adamw", 0.003)
    assert settings(tuning="all", optimizer="adam") == ("adam", 0.00005)
    assert settings(tuning="all", optimizer="adamw", lr=0.003) == ("adamw", 0.003)
    assert settings(optimizer="sgd") == ("sgd", 0.02)
    assert settings("scaffold") == ("sgd", 0.02)
    for tuning, rate in (("head", 0.001), ("all", 0.00005)):
        result = fedattune.fit(texts, "fedavg", make(texts, networks["bert"], tuning=tuning), **usual)
        assert (result.settings.training.optimizer, result.settings.training.lr) == ("adamw", rate)


def test_the_first_token_of_a_vocabulary_is_read_at_the_end_of_a_text(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8}
    config = GPT2Config(vocab_size=9, bos_token_id=8, eos_token_id=8, initializer_range=0.5, **small)
    GPT2Model(config).save_pretrained(tmp_path)
    model = build_model("hf", (4,), 2, {"id": str(tmp_path), "tuning": "head"}).eval()
    with torch.no_grad():
        longer, short = model(torch.tensor([[5.0, 6, 0, -1], [5, 6, -1, -1]]))
        alone = model(torch.tensor([[5.0, 6]]))[0]
    assert not torch.allclose(longer, short)  # GPT-2's token 0 is "!"
    torch.testing.assert_close(short, alone)


def test_positions_that_padding_takes_are_no_tokens(tmp_path: Path) -> None:
    small = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    RobertaModel(RobertaConfig(vocab_size=9, max_position_embeddings=10, **small)).save_pretrained(tmp_path)
    longest = build_model("hf", (8,), 2, {"id": str(tmp_path), "tuning": "head"})
    assert longest(torch.full((1, 8), 5.0)).shape == (1, 2)
    with pytest.raises(ModelError, match="at most 8 tokens"):
        build_model("hf", (9,), 2, {"id": str(tmp_path), "tuning": "head"})
