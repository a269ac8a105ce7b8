"""Upload steps: custom steps, their state in checkpoints, and compression by hand."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import fedattune
from fedattune import ConfigError, Federation
from fedattune.cli import main
from fedattune.core.params import Params
from fedattune.core.payload import Payload
from fedattune.server.robust import ROBUST_RULES
from fedattune.training.uploads.compression import Compression, parse_compression
from fedattune.training.uploads.step import RoundUploads
from federations import make_federation
from flower.runs import run_deployed

pytestmark = pytest.mark.usefixtures("unmeasured")

STEP = '''
from dataclasses import dataclass, replace

from fedattune import UploadStep
from fedattune.core.faults import Fault
from fedattune.training.uploads.step import Report


@dataclass
class Seen:
    rounds: int = 0


class RejectFirst(UploadStep[Seen]):
    """Reject the first client, and halve what the others upload."""

    name = "reject_first"

    def init(self, context):
        return Seen()

    def on_client(self, uploads, memory, context):
        half = uploads.upload.params.map(lambda v: v / 2)
        return replace(uploads, upload=uploads.upload._replace(params=half)), memory

    def on_server(self, state, uploads, context):
        rows = (uploads.ids == 0).nonzero().flatten().tolist()
        return Seen(state.rounds + 1), uploads.reject({row: Fault("rejected", "uploaded as client 0") for row in rows})

    def report(self, state, past, context):
        return Report({"rounds": state.rounds}, [f"{state.rounds} rounds were seen"])


def not_a_step():
    return 3
'''

RUN: dict[str, Any] = {"rounds": 4, "steps": 3, "batch_size": 8, "lr": 0.1}


@pytest.fixture
def step(tmp_path: Path) -> str:
    file = tmp_path / "steps.py"
    file.write_text(STEP)
    return f"{file}:RejectFirst"


def interrupt_and_resume(folder: Path, *given: Any, **settings: Any) -> fedattune.Result:
    """Stop a run after its second round, and resume it."""
    calls = iter([False, True])
    out = folder / "run"
    fedattune.fit(*given, out=out, callbacks=[fedattune.OnRound(lambda _: next(calls))], **settings)
    return fedattune.fit(*given, out=out, resume=True, **settings)


def test_a_custom_step_acts_reports_and_resumes(step: str, ragged: Federation, tmp_path: Path) -> None:
    whole = fedattune.fit(ragged, "fedavg", "mlr", upload_steps=step, **RUN)
    assert whole.reports["reject_first"] == {"rounds": 4}
    assert "fedavg: 4 rounds were seen" in whole.notes
    assert {(client, reason) for _, client, reason in whole.store.faults()} == {(0, "uploaded as client 0")}
    plain = fedattune.fit(ragged, "fedavg", "mlr", **RUN)
    assert not torch.equal(plain.models["1.weight"], whole.models["1.weight"])
    resumed = interrupt_and_resume(tmp_path, ragged, "fedavg", "mlr", upload_steps=step, **RUN)
    assert (resumed.reports, resumed.metrics) == (whole.reports, whole.metrics)


TENSORS = """
from dataclasses import dataclass, field, replace

import torch

from fedattune import UploadStep
from fedattune.core.params import Params
from fedattune.training.uploads.step import Report


@dataclass
class Momentum:
    rounds: int = 0
    mean: Params = field(default_factory=Params)
    norm: torch.Tensor | None = None


class Smooth(UploadStep[Momentum]):
    name = "smooth"

    def init(self, context):
        return Momentum()

    def on_server(self, state, uploads, context):
        mean = uploads.upload.params.map(lambda v: v.mean(dim=0))
        mean = (mean + state.mean) * 0.5 if state.mean else mean
        params = uploads.upload.params.map(lambda v, m: (v + m) / 2, mean)
        norm = sum(v.square().sum() for v in mean.values())
        return Momentum(state.rounds + 1, mean, norm), replace(uploads, upload=uploads.upload._replace(params=params))

    def report(self, state, past, context):
        return Report({"rounds": state.rounds, "norm": float(state.norm)})


@dataclass
class Odd:
    thing: object = field(default_factory=object)


class OddStep(Smooth):
    name = "odd"

    def init(self, context):
        return Odd()


class Failing(Smooth):
    name = "failing"

    def on_server(self, state, uploads, context):
        raise ValueError("no such row")
"""


def test_tensors_of_a_state_go_through_a_checkpoint(ragged: Federation, tmp_path: Path) -> None:
    file = tmp_path / "smooth.py"
    file.write_text(TENSORS)
    step = f"{file}:Smooth"
    whole = fedattune.fit(ragged, "fedavg", "mlr", upload_steps=step, **RUN)
    assert whole.reports["smooth"]["rounds"] == RUN["rounds"]
    resumed = interrupt_and_resume(tmp_path, ragged, "fedavg", "mlr", upload_steps=step, **RUN)
    assert (resumed.reports, resumed.metrics) == (whole.reports, whole.metrics)


def test_a_state_that_no_checkpoint_holds_is_refused_before_the_first_round(ragged: Federation, tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text(TENSORS)
    with pytest.raises(ConfigError, match=r"the upload step odd: no checkpoint holds its state .* expected fields"):
        fedattune.fit(ragged, "fedavg", "mlr", upload_steps=f"{file}:OddStep", **RUN)


def test_an_error_in_a_step_names_it(ragged: Federation, tmp_path: Path) -> None:
    file = tmp_path / "failing.py"
    file.write_text(TENSORS)
    with pytest.raises(ValueError, match="no such row") as failure:
        fedattune.fit(ragged, "fedavg", "mlr", upload_steps=f"{file}:Failing", **RUN)
    assert failure.value.__notes__ == ["in the upload step failing, round 1"]


def test_the_command_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside `local`, which uploads nothing."""
    page = (Path(__file__).parents[2] / "docs" / "extend" / "upload_step.md").read_text("utf-8")
    blocks = re.findall(r"```(python|bash)\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for (_, code), name, (_, command) in zip(blocks[::2], ("steps.py", "rules.py"), blocks[1::2], strict=True):
        Path(name).write_text(code)
        assert main([*shlex.split(command)[1:], "--rounds", "2", "--steps", "2"]) == 0


def test_a_name_that_leads_to_no_step_is_refused(step: str, ragged: Federation) -> None:
    wrong = step.replace("RejectFirst", "not_a_step")
    with pytest.raises(ConfigError, match="returned int, expected an UploadStep"):
        fedattune.fit(ragged, "fedavg", "mlr", upload_steps=wrong, **RUN)


def test_two_steps_of_one_name_are_refused(step: str, ragged: Federation) -> None:
    with pytest.raises(ConfigError, match="two steps are called 'reject_first'"):
        fedattune.fit(ragged, "fedavg", "mlr", upload_steps=f"{step},{step}", **RUN)


def test_a_rule_of_fedattune_is_not_replaced() -> None:
    def median(rows: Params, inputs: Any) -> Params:
        return rows

    for module in (__name__, None):  # None: code without a file
        median.__module__ = module  # type: ignore[assignment]
        with pytest.raises(ConfigError, match="'median' is a robust rule of FedAttune"):
            fedattune.register_robust_rule("values")(median)


def test_code_without_a_file_registers_a_rule_twice() -> None:
    code = "import fedattune\n@fedattune.register_robust_rule('values')\ndef nearest(rows, inputs):\n    return rows\n"
    for _ in range(2):
        exec(code, {"__name__": None})
    assert "nearest" in ROBUST_RULES


@pytest.mark.parametrize("text", ["topk:0", "topk:1.5", "topk:x", "int8:2", "zip"])
def test_impossible_compressions_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected int8, or topk:SHARE"):
        parse_compression(text)


def compress(step: Compression, update: list[float], memory: list[float]) -> tuple[Any, list[float], list[float]]:
    """Send one client's update through the step; return its code, its new memory, and what the server reads."""
    sent = Payload(Params(w=torch.ones(1, len(update))))
    upload = Payload(Params(w=1 + torch.tensor([update])))
    one = torch.tensor([0])
    uploads = RoundUploads(1, one, sent, upload, Params(), one)
    coded, left = step.on_client(uploads, Params(w=torch.tensor([memory])), None)  # type: ignore[arg-type]
    read = step.on_server(None, coded, None)[1].upload.params  # type: ignore[arg-type]
    return coded.upload.params, left["w"][0].tolist(), (read["w"][0] - 1).tolist()


def test_topk_by_hand() -> None:
    """Of (0.5, -2, 1, 0.25) + (0, 0.5, 0.25, 0), the two largest are -1.5 and 1.25."""
    code, left, read = compress(Compression("topk", 0.5), [0.5, -2.0, 1.0, 0.25], [0.0, 0.5, 0.25, 0.0])
    assert sorted(code["w|places"][0].tolist()) == [1, 2]
    assert read == [0.0, -1.5, 1.25, 0.0]
    assert left == [0.5, 0.0, 0.0, 0.25]


def test_int8_by_hand() -> None:
    """The largest magnitude 2 has the code 127: 1 is 63.5, which rounds to the even 64."""
    code, left, read = compress(Compression("int8"), [-2.0, 1.0, 0.0], [0.0, 0.0, 0.0])
    assert code["w|codes"].tolist() == [[-127, 64, 0]]
    assert code["w|codes"].dtype == torch.int8
    assert read == pytest.approx([-2.0, 64 * 2 / 127, 0.0])
    assert left == pytest.approx([0.0, 1 - 64 * 2 / 127, 0.0])


def test_impossible_places_are_not_numbers() -> None:
    step, sent = Compression("topk", 0.5), torch.zeros(2, 4)
    code = {"places": torch.tensor([[0, 9], [1, 2]], dtype=torch.int32), "values": torch.ones(2, 2)}
    assert step.decode(code, sent).isnan().all(1).tolist() == [True, False]


def test_topk_of_all_values_changes_nothing_but_bytes(ragged: Federation) -> None:
    runs = [fedattune.fit(ragged, "fedavg", "dnn", dtype="float64", compress=c, **RUN) for c in (None, "topk:1")]
    assert runs[1].metrics["loss_uniform"] == pytest.approx(runs[0].metrics["loss_uniform"], rel=1e-9)
    assert runs[1].bytes_up * 8 == runs[0].bytes_up * 12  # a value of 8 bytes, and its place of 4
    assert runs[1].bytes_down == runs[0].bytes_down


@pytest.mark.parametrize("method", ["fedavg", "fedmcsa", "scaffold", "pfedla", "ditto"])
def test_bytes_are_counted_and_learning_goes_on(method: str) -> None:
    digits = fedattune.load_federation("digits", partition="dirichlet", clients=8)
    settings: dict[str, Any] = {"rounds": 12, "lr": 0.05, "eval_every": 12, "cohort": 0.5}
    plain = fedattune.fit(digits, method, "dnn", **settings)
    int8 = fedattune.fit(digits, method, "dnn", compress="int8", **settings)
    topk = fedattune.fit(digits, method, "dnn", compress="topk:0.1", **settings)
    extra = 0.5 if method == "scaffold" else 0.0  # its variates travel as they are
    assert int8.bytes_up / plain.bytes_up == pytest.approx(0.25 * (1 - extra) + extra, abs=0.01)
    assert topk.bytes_up / plain.bytes_up == pytest.approx(0.2 * (1 - extra) + extra, abs=0.01)
    assert int8.metrics["acc_uniform"] > plain.metrics["acc_uniform"] - 0.02
    assert topk.metrics["acc_uniform"] > plain.metrics["acc_uniform"] - 0.1
    assert any("error feedback" in note for note in topk.notes)


def test_the_memory_goes_through_a_checkpoint(ragged: Federation, tmp_path: Path) -> None:
    more = RUN | {"compress": "topk:0.2", "cohort": 3}
    whole = fedattune.fit(ragged, "fedmcsa", "dnn", **more)
    resumed = interrupt_and_resume(tmp_path, ragged, "fedmcsa", "dnn", **more)
    assert resumed.metrics == whole.metrics


@pytest.mark.parametrize("text", ["int8", "topk:0.2"])
def test_codes_travel_in_a_deployment(text: str, ragged: Federation, tmp_path: Path) -> None:
    config: dict[str, Any] = {"algorithm": "fedmcsa", "rounds": 3, "cohort": 1.0, "lr": 0.1}
    (deployed,) = run_deployed(ragged, tmp_path / "coded", compress=text, **config)
    (plain,) = run_deployed(ragged, tmp_path / "plain", **config)
    assert deployed.bytes_up < 0.55 * plain.bytes_up
    assert not deployed.store.faults()
    assert deployed.metrics != plain.metrics


def test_secure_aggregation_refuses_codes(ragged: Federation, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compress needs single uploads"):
        run_deployed(ragged, tmp_path, algorithm="fedavg", compress="int8", secure_aggregation=True, nodes=3)


def test_uploads_that_are_no_models_are_not_compressed() -> None:
    run = fedattune.fit(make_federation([20, 20, 20]), "mocha", "mlr", compress="int8", **RUN)
    assert any("uploads were not compressed" in note for note in run.notes)


def test_a_custom_robust_rule_replaces_the_average(ragged: Federation, tmp_path: Path) -> None:
    """A rule that takes the first client's update gives everybody the first client's model."""
    file = tmp_path / "rules.py"
    file.write_text(
        "import torch\nfrom fedattune import register_robust_rule\n\n\n"
        "@register_robust_rule('weights')\n"
        "def first(products, inputs):\n    return torch.eye(len(products), dtype=products.dtype)[0]\n"
    )
    run = fedattune.fit(ragged, "fedavg", "mlr", robust=f"{file}:first", weight_decay=0.0, **RUN | {"rounds": 1})
    alone = fedattune.fit(ragged, "local", "mlr", weight_decay=0.0, **RUN | {"rounds": 1})
    one = alone.models["1.weight"][0]
    assert run.trained_server is not None
    everybody: Any = run.trained_server.state["w"]
    assert torch.allclose(everybody["1.weight"], one, atol=1e-6)
    with pytest.raises(ConfigError, match="did you mean 'median'"):
        fedattune.fit(ragged, "fedavg", "mlr", robust="medain", **RUN)
