"""The schema: YAML and command line are one, the command line wins, every error is told at once."""

from functools import reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from pydantic import BeforeValidator
from pydantic_core import PydanticUndefined

from fedattune import ConfigError, Settings
from fedattune.core.settings import SettingsKeywords
from fedattune.experiments.config import Experiment, ExperimentKeywords
from fedattune.experiments.load import assign_options, load_experiment, load_options


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "exp.yaml"
    path.write_text(text)
    return path


def test_yaml_and_command_line(tmp_path: Path) -> None:
    path = file(
        tmp_path, "rounds: 7\nbatch-size: 5\nalgorithms: local, fedavg\nlr: 1e-3\nset: {fedavg: {weighting: uniform}}"
    )
    found = load_experiment(path, {"rounds": "9", "set": {"fedmcsa.sigma": 3}})
    assert (found.rounds, found.training.batch_size, found.algorithms, found.training.lr) == (
        9,
        5,
        ("local", "fedavg"),
        1e-3,
    )
    assert found.set == {"fedavg.weighting": "uniform", "fedmcsa.sigma": 3}


def test_a_file_says_where_results_go(tmp_path: Path) -> None:
    path = file(tmp_path, "rounds: 7\nout: o\njson: r.json\nquiet: true")
    experiment, output = load_options(path, {"out": Path("p"), "config": path})
    assert experiment == Experiment(rounds=7)
    assert (output.out, output.json_file, output.quiet) == (Path("p"), Path("r.json"), True)


def test_settings_in_python_are_checked_alike() -> None:
    with pytest.raises(ConfigError) as error:
        Settings.from_keywords(rounds=True, cohort=0, steps=1, epochs=2, lr=10**5000, ronds=3)
    for part in ("rounds: ", "cohort: ", "epochs: ", "lr: ", "did you mean 'rounds'?"):
        assert part in str(error.value)


def test_the_command_lines_unit_of_work_replaces_the_files(tmp_path: Path) -> None:
    found = load_experiment(file(tmp_path, "steps: 5"), {"epochs": "2"})
    assert (found.training.steps, found.training.epochs) == (None, 2)


def test_every_error_at_once_with_file_key_and_near_name(tmp_path: Path) -> None:
    path = file(tmp_path, "ronds: 3\nlr: fast\nbatch_size: 0\ndevice: gpu\nsteps: 2\nepochs: 3\nseeds: 1.5\nquiet: 5")
    with pytest.raises(ConfigError) as error:
        load_options(path, {"cohort": "many"}, errors=["unknown option --x"])
    message = str(error.value)
    for part in (
        f"{path}: unknown key 'ronds', did you mean 'rounds'?",
        f"{path}: lr: ",
        f"{path}: batch_size: ",
        f"{path}: device: ",
        f"{path}: seeds: ",
        f"{path}: epochs: give steps (2) or epochs, not both, got 3",
        f"{path}: quiet: ",
        "--cohort: expected a number of clients",
        "unknown option --x",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rounds: [1", "is not valid YAML at line"),
        ("- 1", "must hold keys with values"),
        ("rounds: 1\nrounds_: 2", "unknown key 'rounds_'"),
        ("batch-size: 1\nbatch_size: 2", "given twice"),
        ("algorithm: a\nalgorithms: b", "given twice"),
        ("steps: 1\nepochs: 2", "not both"),
        ("set: 5", "expected options such as"),
        ("algorithms: 5", "expected names"),
        ("algorithms: ' '", "at least one name"),
        ("test: 1", "test: input should be less than 1"),
        ("clients: 1", "clients: input should be greater"),
        ("resume: x", "resume stands only on the command line: --resume continues"),
        ("config: x", "config stands only on the command line: --config names such a file itself"),
        ("outt: x", "unknown key 'outt', did you mean 'out'?"),
        ("json: true", "json: input is not a valid path"),
        ("lr: 1\nseed: 2\nlr: 3", "not valid YAML at line 3: the key 'lr' is given twice"),
        ("set:\n  a: {b: 1}\n  a: {b: 1}", "at line 3: the key 'a' is given twice"),
        ("rounds: yes", "rounds: input should be a number, not true or false, got True"),
        ("lr: true", "lr: input should be a number, not true or false"),
        ("cohort: true", "cohort: input should be a number, not true or false"),
        ("cohort: [1]", "cohort: "),
        ("rounds: 2001-99-99", "not valid YAML"),
        ("rounds: " + "9" * 5000, "not valid YAML"),
        ("a: " + "[" * 5000, "not valid YAML"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_experiment(file(tmp_path, text), {})


def test_hash_is_of_what_decides_the_numbers() -> None:
    one = Experiment()
    assert len(one.hash) == 12
    assert one.hash == Experiment(engine="sequential", device="cpu", data_dir=Path("x"), rounds_to=0.9).hash
    assert Experiment(data="a/p.csv").hash == Experiment(data="b/p.csv").hash
    assert len({one.hash, Experiment(rounds=51).hash, Experiment(set={"a": 1}).hash, Experiment(cohort=1).hash}) == 4


def test_yaml_round_trip(tmp_path: Path) -> None:
    one = Experiment(cohort=1.0, lr=1e-5, set={"a.b": [1, "x"]}, algorithms=("local",), data_dir=Path("d"))
    again = load_experiment(file(tmp_path, one.to_yaml()), {})
    assert again == one
    assert isinstance(again.participation.cohort, float)
    assert yaml.safe_load(one.to_yaml())["steps"] is None


KNOWN = {
    "algorithm": {"fedmcsa": ["sigma", "lam"], "pfedme": ["lam", "beta"]},
    "model": {"dnn": ["hidden"], "my.models:make": ["width"]},
    "partition": {"dirichlet": ["beta"]},
    "data": {"digits": []},
}


def test_set_options_are_shared_out() -> None:
    given = {"fedmcsa.lam": 1, "lam": 2, "hidden": 3, "partition.beta": 4, "my.models:make.width": 5, "pfedme.beta": 6}
    found = assign_options(given, KNOWN)
    assert found["algorithm"] == {"fedmcsa": {"lam": 1}, "pfedme": {"lam": 2, "beta": 6}}
    assert found["model"] == {"dnn": {"hidden": 3}, "my.models:make": {"width": 5}}
    assert found["partition"] == {"dirichlet": {"beta": 4}}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("sigmaa", "has an option 'sigmaa'; did you mean 'sigma'"),
        ("fedmcsa.sigmaa", "fedmcsa has no option 'sigmaa'; did you mean 'sigma'"),
        ("fedmcza.sigma", "nothing called 'fedmcza' is used here; did you mean 'fedmcsa'"),
        ("fedamp.alpha", "nothing called 'fedamp' is used here"),
        ("beta", "several things; write pfedme.beta or dirichlet.beta"),
        ("model.depth", "model has no option 'depth'"),
        ("algorithm.lam", "nothing called 'algorithm'"),
    ],
)
def test_set_options_that_cannot_be(key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        assign_options({key: 1}, KNOWN)


def _plain(annotation: Any) -> Any:
    """Return the type of what a user may pass, without the metadata of Pydantic."""
    if get_origin(annotation) is Annotated:
        kind, *metadata = get_args(annotation)
        taken = [each.json_schema_input_type for each in metadata if isinstance(each, BeforeValidator)]
        return _plain(next((each for each in taken if each not in (PydanticUndefined, Any)), kind))
    if get_origin(annotation) in (Union, UnionType):
        return reduce(or_, (_plain(kind) for kind in get_args(annotation)))
    return annotation


def test_typed_keywords_are_the_options() -> None:
    fields = Settings.flat_fields()
    expected = {
        name: _plain(Annotated[field.annotation if field.default is not None else field.annotation | None, *metadata])
        for name, field in fields.items()
        for metadata in [field.metadata or [None]]
    }
    assert get_type_hints(SettingsKeywords) == expected
    apart = {"data", "model", "algorithms", "set"}  # arguments of compare and tune
    assert get_type_hints(ExperimentKeywords).keys() == Experiment.flat_fields().keys() - apart
