"""FedAttune inside a Flower project: the strategy, the mod, and training by the engine in place of a loop."""

import copy
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fedattune
from fedattune import Algorithm, ConfigError, Federation, ModelError, RunError, flower
from fedattune.client import SGD
from fedattune.flower.messages import EXTRA
from fedattune.flower.strategy import list_plain_methods
from fedattune.server import Average
from flower.in_process import InProcessGrid

SIZES = (20, 23, 26)
LR = 0.1
Part = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Flower logs every round."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def make_parts(dtype: torch.dtype = torch.float32) -> list[dict[str, Part]]:
    """Three clients with rules of their own: rows to train, to choose and to test by."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for i, n in enumerate(SIZES):
        x = torch.randn(n + 10, 6, generator=generator)
        y = (x[:, 0] * (1 if i < 2 else -1) > 0).long() + (x[:, 1] > 1)
        x = x.to(dtype)
        parts.append({"train": (x[:n], y[:n]), "validation": (x[n:-6], y[n:-6]), "test": (x[-6:], y[-6:])})
    return parts


def make_federation(parts: Sequence[Mapping[str, Part]]) -> Federation:
    return fedattune.federation_from(list(parts), classes=["0", "1", "2"])


def make_model(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(5)] if norm else []
    return nn.Sequential(nn.Linear(6, 5), *middle, nn.ReLU(), nn.Linear(5, 3))


class Project:
    """A Flower project: a plain training function on the whole part, two epochs, and what its nodes evaluated."""

    def __init__(self, model: nn.Module, parts: Sequence[Mapping[str, Part]], *, mods: Any = (flower.mod,)) -> None:
        self.model, self.parts, self.evaluated = model, parts, dict[int, dict[str, Tensor]]()
        self.messages: list[Message] = []
        self.spoil: Callable[[int, dict[str, Tensor], dict[str, Any]], None] = lambda *_: None
        self.app = ClientApp(mods=[self.record, *mods])
        self.app.train()(self.train)
        self.app.evaluate()(self.evaluate)

    def record(self, message: Message, context: Context, call_next: Any) -> Message:
        """Keep what crosses the network."""
        reply: Message = call_next(message, context)
        self.messages += [message, reply]
        return reply

    def load(self, message: Message) -> nn.Module:
        model = copy.deepcopy(self.model)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return model

    def train(self, message: Message, context: Context) -> Message:
        node = int(context.node_config["partition-id"])
        model, (x, y) = self.load(message).train(), self.parts[node]["train"]
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        state, metrics = dict(model.state_dict()), {"num-examples": len(y), "train_loss": 0.5}
        self.spoil(node, state, metrics)
        content = RecordDict({"arrays": ArrayRecord(state), "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=message)

    def evaluate(self, message: Message, context: Context) -> Message:
        node = int(context.node_config["partition-id"])
        self.evaluated[node] = dict(self.load(message).state_dict())
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "acc": 0.5})}), reply_to=message)

    def grid(self, n: int = 3) -> InProcessGrid:
        return InProcessGrid(self.app, [{"partition-id": i} for i in range(n)], {})

    def start(self, strategy: flower.MethodStrategy, rounds: int = 2, grid: InProcessGrid | None = None) -> Any:
        return strategy.start(grid or self.grid(), ArrayRecord(self.model.state_dict()), num_rounds=rounds)


class EngineProject(Project):
    """The same project with training by FedAttune's engine, by steps on mini-batches."""

    def __init__(self, *args: Any, method: Algorithm | None = None, **settings: Any) -> None:
        super().__init__(*args, mods=())
        self.method, self.settings = method, {"lr": LR, "steps": 3, "batch_size": 8} | settings

    def train(self, message: Message, context: Context) -> Message:
        part = self.parts[int(context.node_config["partition-id"])]
        data: Any = part["train"]
        if isinstance(data[0], Tensor):
            data = DataLoader(TensorDataset(*data), batch_size=4)
        return flower.train(
            message,
            context,
            copy.deepcopy(self.model),
            data,
            validation=part["validation"],
            method=self.method,
            **self.settings,
        )

    def evaluate(self, message: Message, context: Context) -> Message:
        node = int(context.node_config["partition-id"])
        part, model = self.parts[node], copy.deepcopy(self.model)
        found = flower.personal_model(
            message, context, model, part["train"], validation=part["validation"], method=self.method
        )
        self.evaluated[node] = dict(found.state_dict())
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "acc": 0.5})}), reply_to=message)


def assert_models(evaluated: Mapping[int, Mapping[str, Tensor]], result: fedattune.Result, atol: float) -> None:
    assert result.models
    for node, state in evaluated.items():
        for name, rows in result.models.items():
            torch.testing.assert_close(state[name], rows[node], atol=atol, rtol=0)


@pytest.mark.parametrize("name", ["fedavg", "fedmcsa", "pfedla", "igfl_s", "fedadam", "fedper", "local"])
def test_a_plain_training_function_gives_what_fit_gives(name: str) -> None:
    """Whole parts as batches, in float64: the user's loop, and the strategy's server, against a simulation."""
    parts, model = make_parts(torch.float64), make_model().double()
    project = Project(model, parts)
    project.start(flower.strategy(name, model), 3)
    result = fedattune.fit(
        make_federation(parts),
        name,
        model,
        rounds=3,
        epochs=2,
        batch_size=100,
        lr=LR,
        weight_decay=0.0,
        dtype="float64",
        early_stopping="off",
    )
    assert_models(project.evaluated, result, 1e-7)  # the data of a federation are float32


@pytest.mark.parametrize(
    "name",
    [
        "scaffold",
        "ditto",
        "mocha",
        "fedavg_ft",
        "fedfomo",
        "fedrod",
        "attune",
        "moon",
        "fedproto",
        "fedgh",
        "fedpac",
        "fednova",
        "fedbabu",
        "knn_per",
        "pfedgraph",
        "feddbe",
    ],
)
def test_train_gives_what_fit_gives(name: str) -> None:
    """Any method, with its extras and its state on the nodes: the same numbers as in a simulation."""
    parts, model = make_parts(), make_model()
    project = EngineProject(model, parts)
    project.start(flower.strategy(name, model, input_shape=(6,)))
    settings: dict[str, Any] = {"lr": LR, "steps": 3, "batch_size": 8, "rounds": 2, "early_stopping": "off"}
    assert_models(project.evaluated, fedattune.fit(make_federation(parts), name, model, **settings), 1e-6)


def test_personal_models_differ_and_a_global_model_does_not() -> None:
    parts, model = make_parts(), make_model()
    models = {}
    for name in ("fedavg", "fedmcsa"):
        strategy = flower.strategy(name, model, options={"sigma": 1e4} if name == "fedmcsa" else {})
        Project(model, parts).start(strategy)
        models[name] = [arrays.to_torch_state_dict()["2.weight"] for arrays in strategy.personal_arrays().values()]
    assert torch.equal(models["fedavg"][0], models["fedavg"][2])
    assert not torch.allclose(models["fedmcsa"][0], models["fedmcsa"][2], atol=1e-3)


def test_personal_tensors_never_leave_a_node() -> None:
    """FedBN: BatchNorm stays on the nodes, with its statistics, and each node goes on with its own."""
    parts, model = make_parts(), make_model(norm=True)
    project = Project(model, parts)
    result = project.start(flower.strategy("fedbn", model))
    own = {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
    train = [message for message in project.messages if message.metadata.message_type == "train"]
    replies = [message for message in train if message.metadata.src_node_id != 1]
    assert len(replies) == 6
    assert all(own.isdisjoint(reply.content["arrays"]) for reply in replies)
    assert int(project.evaluated[0]["1.num_batches_tracked"]) == 4  # two rounds of two steps
    assert not torch.equal(project.evaluated[0]["1.weight"], project.evaluated[1]["1.weight"])
    assert torch.equal(project.evaluated[0]["0.weight"], project.evaluated[1]["0.weight"])
    assert torch.equal(result.arrays.to_torch_state_dict()["1.weight"], torch.ones(5))


def test_statistics_are_averaged_by_samples() -> None:
    parts, model = make_parts(), make_model(norm=True)
    project = Project(model, parts)
    sent: dict[int, Tensor] = {}
    project.spoil = lambda node, state, _: sent.update({node: state["1.running_mean"].clone()})
    state = project.start(flower.strategy("fedmcsa", model), 1).arrays.to_torch_state_dict()
    mean = sum(n * sent[i].double() for i, n in enumerate(SIZES)) / sum(SIZES)
    torch.testing.assert_close(state["1.running_mean"].double(), mean, atol=1e-6, rtol=0)
    assert int(state["1.num_batches_tracked"]) == 2


def test_statistics_that_are_not_finite_are_left_out_and_a_mask_is_not() -> None:
    model = make_model(norm=True)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    project = Project(model, make_parts())
    project.spoil = lambda node, state, _: state.update({"1.running_var": torch.full((5,), torch.nan)} if node else {})
    state = project.start(flower.strategy("fedavg", model), 1).arrays.to_torch_state_dict()
    assert state["1.running_var"].isfinite().all()
    assert torch.equal(state["mask"], model.mask)


def test_messages_have_one_record_of_each_kind_as_mods_of_flower_expect() -> None:
    project = Project(make_model(), make_parts())
    strategy = flower.strategy("fedmcsa", project.model)
    strategy.start(
        project.grid(), ArrayRecord(project.model.state_dict()), num_rounds=1, train_config=ConfigRecord({"lr": 0.3})
    )
    content = project.messages[0].content
    assert list(content) == ["arrays", "config"]
    assert content["config"]["lr"] == 0.3
    assert content["config"]["server-round"] == 1


def test_a_node_that_fails_keeps_its_row_and_a_newcomer_joins() -> None:
    """Node 1 errs in round 2, node 2 sends nothing, and node 3 comes in round 2."""
    parts, model = make_parts(), make_model()
    project = Project(model, [*parts, parts[0]])
    strategy, round_ = flower.strategy("fedmcsa", model), 0

    def spoil(node: int, *_: Any) -> None:
        if round_ == 2 and node == 1:
            raise OSError("the disk is full")

    project.spoil = spoil
    first = project.grid()
    project.start(strategy, 1, first)
    before = strategy._state["theta"]["0.weight"].clone()
    round_ = 2
    later = project.grid(4)
    later.lost = lambda node, _: node == 102
    arrays = ArrayRecord(model.state_dict())
    replies = later.send_and_receive(strategy.configure_train(2, arrays, ConfigRecord(), later))
    strategy.aggregate_train(2, replies)
    after = strategy._state["theta"]["0.weight"]
    assert torch.equal(after[1:3], before[1:3])
    assert not torch.equal(after[0], before[0])
    assert len(after) == 4
    # The newcomer began at the mean of the others, and took two steps from there.
    newcomer = next(m for m in project.messages if m.metadata.dst_node_id == 103)
    start = newcomer.content["arrays"].to_torch_state_dict()["0.weight"]
    torch.testing.assert_close(start, before.mean(0))
    assert not torch.equal(after[3], start)
    assert strategy._state["n"].tolist() == [20, 23, 26, 20]


def test_some_nodes_train_and_others_are_evaluated() -> None:
    project = Project(make_model(), make_parts())
    strategy = flower.strategy("fedmcsa", project.model, fraction_train=0.4, min_train_nodes=1)
    project.start(strategy, 1)
    (trained,) = strategy._state["has_uploaded"].nonzero().flatten().tolist()
    initial = project.model.state_dict()["0.weight"]
    assert [torch.equal(project.evaluated[i]["0.weight"], initial) for i in range(3)] == [
        i != trained for i in range(3)
    ]


def test_a_new_start_forgets_the_last_one() -> None:
    project = Project(make_model(), make_parts())
    strategy = flower.strategy("fedavgm", project.model)
    first, second = (project.start(strategy, 1).arrays.to_torch_state_dict() for _ in range(2))
    assert all(torch.equal(first[k], second[k]) for k in first)


BAD: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, Any]], Any], str]] = {
    "shape": (lambda state, _: state.update({"0.weight": torch.zeros(4, 6)}), r"shape \(4, 6\): '0.weight', expected"),
    "missing": (lambda state, _: state.pop("2.bias"), "no such array: '2.bias'"),
    "integer": (lambda state, _: state.update({"0.bias": torch.ones(5, dtype=torch.int8)}), "'0.bias' as torch.int8"),
    "nan": (lambda state, _: state["0.bias"].fill_(torch.nan), "not finite in '0.bias'.*lower the learning rate"),
    "no count": (lambda _, metrics: metrics.pop("num-examples"), r"sent no num-examples.*len\(trainloader.dataset\)"),
    "no rows": (lambda _, metrics: metrics.update({"num-examples": 0}), "sent 0 num-examples"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_reply_that_does_not_fit_is_left_out_and_named(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    spoil, text = BAD[kind]
    project = Project(make_model(), make_parts())
    project.spoil = lambda node, state, metrics: spoil(state, metrics) if node == 1 else None
    strategy = flower.strategy("fedmcsa", project.model)
    grid = project.grid()
    initial = ArrayRecord(project.model.state_dict())
    with caplog.at_level(logging.WARNING, "flwr"):
        strategy.aggregate_train(1, grid.send_and_receive(strategy.configure_train(1, initial, ConfigRecord(), grid)))
    assert strategy._state["has_uploaded"].tolist() == [True, False, True]
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("round 1: node 101 sent")
    project.spoil = lambda _, state, metrics: spoil(state, metrics)
    with pytest.raises(RunError, match=f"round 1: no reply fits: node 10. .*{text}"):
        project.start(strategy, 1)


def put_extra(values: dict[str, Tensor]) -> Callable[[Message], None]:
    return lambda reply: reply.content.update({EXTRA: ArrayRecord(values)})


def put_junk(reply: Message) -> None:
    reply.content["arrays"]["0.weight"] = Array("float32", (5, 6), "numpy.ndarray", b"junk")


DAMAGE: dict[str, tuple[Callable[[Message], Any], str]] = {
    "other model": (put_extra({"params/0.weight": torch.full((5, 6), torch.nan)}), "sent 'params/0.weight' beside"),
    "other shape": (put_extra({"params/0.weight": torch.zeros(1)}), "beside its model, expected nothing"),
    "extra": (put_extra({"extra/dc/0.weight": torch.zeros(5, 6)}), "sent 'extra/dc/0.weight' beside its model"),
    "huge count": (lambda reply: reply.content["metrics"].update({"num-examples": 1e30}), r"sent 1e\+30 num-examples"),
    "infinite count": (lambda reply: reply.content["metrics"].update({"num-examples": math.inf}), "from 1 to 2"),
    "junk": (put_junk, r"sent no valid reply \("),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_reply_is_left_out(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    spoil, text = DAMAGE[kind]
    project = Project(make_model(), make_parts())
    strategy, grid = flower.strategy("fedavg", project.model), project.grid()
    initial = ArrayRecord(project.model.state_dict())
    replies = list(grid.send_and_receive(strategy.configure_train(1, initial, ConfigRecord(), grid)))
    spoil(next(reply for reply in replies if reply.metadata.src_node_id == 101))
    with caplog.at_level(logging.WARNING, "flwr"):
        arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None
    assert all(value.isfinite().all() for value in arrays.to_torch_state_dict().values())
    (message,) = (record.getMessage() for record in caplog.records)
    assert re.search(f"round 1: node 101 {text}" if text.startswith("sent") else text, message)
    assert message.endswith("its reply is left out")


@pytest.mark.parametrize("value", [torch.full((5, 6), torch.nan), torch.zeros(2)])
def test_extras_are_those_of_a_node_that_trains(value: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    project = EngineProject(make_model(), make_parts())
    strategy, grid = flower.strategy("scaffold", project.model), project.grid()
    initial = ArrayRecord(project.model.state_dict())
    replies = list(grid.send_and_receive(strategy.configure_train(1, initial, ConfigRecord(), grid)))
    extras = next(reply for reply in replies if reply.metadata.src_node_id == 101).content.array_records[EXTRA]
    name = next(name for name in extras if name.endswith("0.weight"))
    extras[name] = Array(value.numpy())
    with caplog.at_level(logging.WARNING, "flwr"):
        strategy.aggregate_train(1, replies)
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("round 1: node 101 sent")
    assert f"'{name}'" in message


def test_metrics_that_do_not_fit_each_other_have_no_mean(caplog: pytest.LogCaptureFixture) -> None:
    project = Project(make_model(), make_parts())
    project.spoil = lambda node, _, metrics: metrics.update(losses=[0.5] * (node + 1))
    strategy, grid = flower.strategy("fedavg", project.model), project.grid()
    initial = ArrayRecord(project.model.state_dict())
    replies = grid.send_and_receive(strategy.configure_train(1, initial, ConfigRecord(), grid))
    with caplog.at_level(logging.WARNING, "flwr"):
        arrays, metrics = strategy.aggregate_train(1, replies)
    assert arrays is not None
    assert metrics is None
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("round 1: the metrics of the replies have no mean (ValueError")


def start_plain(name: str, **options: Any) -> None:
    project = Project(make_model(), make_parts(), mods=())
    project.start(flower.strategy(name, project.model, **options), 1)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: flower.strategy("fedmcas", make_model()), "unknown algorithm 'fedmcas'; did you mean 'fedmcsa'"),
        (lambda: flower.strategy("fedmcsa", make_model(), options={"sigm": 1}), "sigm"),
        (
            lambda: flower.strategy("fedmcsa", make_model(), fraction=0.5),
            "'fraction'; beside its own arguments it takes",
        ),
        (lambda: flower.strategy("fedmcsa", 0.5), "got float as the model"),  # type: ignore[arg-type]
        (lambda: flower.strategy("attune", make_model()), "the shape of one sample; give input_shape"),
        (lambda: flower.strategy("vrl_sgd", make_model(), fraction_train=0.5), "all nodes in each round"),
        (lambda: flower.strategy("fedavg", make_model(), bn_buffers="none"), "bn_buffers: got 'none'"),  # type: ignore[arg-type]
        (lambda: start_plain("fedper"), r"fedper keeps '2.bias' on the nodes, and node 10. sent it.*mods="),
        (lambda: start_plain("scaffold"), "scaffold changes the local training.*flower.train.*fedmcsa"),
    ],
)
def test_errors_of_a_strategy_say_what_to_do(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_wrapper_whose_noise_would_reach_no_node_is_refused() -> None:
    project = Project(make_model(), make_parts())
    wrapper = DifferentialPrivacyServerSideFixedClipping(flower.strategy("fedavg", project.model), 1.0, 1.0, 3)
    with pytest.raises(ConfigError, match=r"fedavg: the model was changed .*leave the wrapper out"):
        wrapper.start(project.grid(), ArrayRecord(project.model.state_dict()), num_rounds=1)
    assert not project.evaluated


class Tied(nn.Module):
    """Tokens in, classes out, by one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embedding(x).mean(1))


@pytest.mark.parametrize("name", ["fedmcsa", "scaffold", "attune"])
def test_tied_weights_and_tokens(name: str) -> None:
    """Both names of a tied tensor are sent, and stay one tensor; node 1 lacks most classes, and its key is its own."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for i in range(3):
        x = torch.randint(7, (20, 5), generator=generator)
        parts.append(dict.fromkeys(("train", "validation", "test"), (x, x[:, 0] if i != 1 else torch.full((20,), 6))))
    torch.manual_seed(0)
    model = Tied()
    make = Project if name == "fedmcsa" else EngineProject
    project = make(model, parts)
    project.spoil = lambda _, state, metrics: metrics.update(rows=metrics.pop("num-examples"))
    project.start(flower.strategy(name, model, input_shape=(5,), weighted_by_key="rows", fraction_evaluate=0.0))
    sent = project.messages[-2].content["arrays"].to_torch_state_dict()
    names = [key for key in sent if key.endswith(("embedding.weight", "out.weight", "head.weight"))]
    assert torch.equal(sent[names[0]], sent[names[1]]) or name == "attune"
    assert not torch.equal(sent[names[0]], model.embedding.weight)
    reply = project.messages[-1].content
    assert list(reply["metrics"])[-1] == "rows"


def test_an_input_shape_is_that_of_a_sample() -> None:
    project = Project(make_model(), make_parts())
    with pytest.raises(ConfigError, match=r"input_shape: the model Sequential does not take .* \(7,\)"):
        project.start(flower.strategy("attune", project.model, input_shape=(7,)))


def test_nodes_that_cannot_load_the_network_of_a_method_are_told_about_train(caplog: pytest.LogCaptureFixture) -> None:
    project = Project(make_model(), make_parts())
    with caplog.at_level(logging.WARNING, "flwr"):
        project.start(flower.strategy("attune", project.model, input_shape=(6,), fraction_evaluate=0.0), 1)
    *failures, hint = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "Missing key(s) in state_dict" in failures[-1]
    assert hint.startswith("round 1: no node replied; attune changes the local training")
    assert "fedattune.flower.train" in hint


def test_initial_arrays_are_those_of_the_model() -> None:
    project = Project(make_model(), make_parts())
    strategy = flower.strategy("fedavg", make_model(norm=True))
    with pytest.raises(ConfigError, match=r"initial_arrays: '1.bias' is not alike.*ArrayRecord\(model.state_dict"):
        project.start(strategy)


def handle(project: Project, strategy: flower.MethodStrategy) -> Message:
    """Let the first node handle its first message; its errors come out."""
    grid = project.grid()
    message = next(iter(strategy.configure_train(1, ArrayRecord(project.model.state_dict()), ConfigRecord(), grid)))
    grid._identify(message.metadata.dst_node_id)
    return project.app(message, grid.contexts[message.metadata.dst_node_id])


def test_errors_of_a_node_say_what_to_do() -> None:
    parts, model = make_parts(), make_model()
    scaffold = flower.strategy("scaffold", model)
    with pytest.raises(ConfigError, match="unknown setting 'epoch'; did you mean 'epochs'"):
        handle(EngineProject(model, parts, steps=None, epoch=2), scaffold)
    with pytest.raises(ConfigError, match="rounds is no setting of local training"):
        handle(EngineProject(model, parts, rounds=2), scaffold)
    with pytest.raises(RunError, match=r"training diverged in round 1 .*lower the learning rate \(lr is 1e\+30\)"):
        handle(EngineProject(model, parts, lr=1e30), scaffold)
    double = make_model().double()
    with pytest.raises(ConfigError, match="model of the strategy is float64, and the node trains in float32"):
        handle(EngineProject(double, parts), flower.strategy("scaffold", double))
    other = EngineProject(model, parts)
    other.model = make_model(norm=True)
    grid = other.grid()
    message = next(iter(scaffold.configure_train(1, ArrayRecord(model.state_dict()), ConfigRecord(), grid)))
    context = grid.contexts[100]
    with pytest.raises(ModelError, match="the model Sequential of the node is not the one of the strategy"):
        other.app(message, context)
    foreign = Message(RecordDict({"arrays": ArrayRecord(model.state_dict())}), dst_node_id=100, message_type="train")
    with pytest.raises(ConfigError, match="not from a strategy of FedAttune"):
        other.app(foreign, context)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adam", "lr": 0.01, "optimizer_state": "keep", "lr_schedule": "cosine"},
        {"loss": "focal", "class_weights": "balanced", "max_grad_norm": 0.5},
    ],
)
def test_settings_of_local_training_are_those_of_fit(settings: dict[str, Any]) -> None:
    parts, model = make_parts(), make_model()
    project = EngineProject(model, parts, **settings)
    project.start(flower.strategy("fedmcsa", model))
    given: dict[str, Any] = {"lr": LR, "steps": 3, "batch_size": 8, "rounds": 2, "early_stopping": "off"} | settings
    assert_models(project.evaluated, fedattune.fit(make_federation(parts), "fedmcsa", model, **given), 1e-6)


@pytest.mark.parametrize("n", [1, 2])
def test_numbers_are_learnt_in_their_unit(n: int) -> None:
    """Two whole-batch steps of squared error by `train`, against torch's own."""
    torch.manual_seed(0)
    model = nn.Linear(6, n)
    parts = []
    for part in make_parts():
        x, _ = part["train"]
        parts.append(dict.fromkeys(("train", "validation"), (x, (20 + 3 * x[:, :n]).squeeze(1))))
    project = EngineProject(model, parts, steps=None, epochs=2, batch_size=100, lr=0.01)
    project.start(flower.strategy("fedmcsa", model, options={"weight_decay": 0.0}), 1)
    for node, part in enumerate(parts):
        mine, (x, y) = copy.deepcopy(model), part["train"]
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.mse_loss(mine(x).squeeze(1), y).backward()
            optimizer.step()
        for name, value in mine.state_dict().items():
            torch.testing.assert_close(project.evaluated[node][name], value, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["labels", "number", "positions"])
def test_targets_of_a_node_may_be_all_the_same(kind: str) -> None:
    """A whole-batch step on targets that do not differ on this node, or have not the last class."""
    torch.manual_seed(0)
    out = {"labels": nn.Linear(6, 2), "number": nn.Linear(6, 1)}
    model = out.get(kind, nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (3, 2))))
    parts = make_parts()
    for part in parts:
        for key, (x, _) in part.items():
            y = {"labels": torch.zeros(len(x), 2), "number": torch.full((len(x),), 2.5)}
            part[key] = x, y.get(kind, torch.tensor([[0, 1]]).repeat(len(x), 1))
    project = EngineProject(model, parts, steps=None, epochs=1, batch_size=100)
    project.start(flower.strategy("fedmcsa", model, options={"weight_decay": 0.0}), 1)
    losses: dict[str, Callable[..., Tensor]] = {
        "labels": nn.functional.binary_cross_entropy_with_logits,
        "number": lambda z, y: nn.functional.mse_loss(z.squeeze(1), y),
    }
    assert len(project.evaluated) == len(parts)
    for node, part in enumerate(parts):
        mine, (x, y) = copy.deepcopy(model), part["train"]
        losses.get(kind, nn.functional.cross_entropy)(mine(x), y).backward()
        for name, value in mine.named_parameters():
            assert value.grad is not None
            torch.testing.assert_close(project.evaluated[node][name], value - LR * value.grad, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["column", "tokens", "features"])
def test_a_node_need_not_have_all_classes(kind: str) -> None:
    """Labels as a column, and sequences of unequal length; nodes have class 0 alone."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input, self.out = nn.Embedding(9, 6) if kind == "tokens" else nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.out(self.input(x).sum(1) / lengths[:, None])

    n, lengths = 6, range(1, 7)
    x: Any = {
        "tokens": [torch.arange(length) for length in lengths],
        "features": [torch.ones(length, 6) for length in lengths],
    }.get(kind, torch.ones(n, 6))
    model = make_model() if kind == "column" else fedattune.WithPadding(Mean())
    y = torch.zeros((n, 1) if kind == "column" else n, dtype=torch.int64)
    project = EngineProject(model, [dict.fromkeys(("train", "validation"), (x, y))] * 2)
    project.start(flower.strategy("ditto", model), 1, project.grid(2))
    assert project.evaluated.keys() == {0, 1}


def test_a_tenth_is_held_out_for_methods_that_choose_by_validation_samples() -> None:
    class Alone(EngineProject):
        def train(self, message: Message, context: Context) -> Message:
            data = self.parts[int(context.node_config["partition-id"])]["train"]
            return flower.train(message, context, copy.deepcopy(self.model), data, **self.settings)

    counts = {}
    for name in ("attune", "fedmcsa"):
        project = Alone(make_model(), make_parts())
        project.start(flower.strategy(name, project.model, input_shape=(6,), fraction_evaluate=0.0), 1)
        replies = [m.content["metrics"]["num-examples"] for m in project.messages[1::2]]
        counts[name] = sorted(replies)
    assert counts == {"attune": [18, 21, 24], "fedmcsa": [20, 23, 26]}


def test_a_method_of_ones_own_is_given_to_both_sides() -> None:
    """It is the user's object at the node: a message never names code to load."""
    parts, model = make_parts(), make_model()
    mine = Algorithm(SGD(clip=0.1), Average(), evaluation_point="received")
    project = EngineProject(model, parts, method=mine)
    project.start(flower.strategy(mine, model))
    settings: dict[str, Any] = {"lr": LR, "steps": 3, "batch_size": 8, "rounds": 2, "early_stopping": "off"}
    assert_models(project.evaluated, fedattune.fit(make_federation(parts), mine, model, **settings), 1e-6)
    with pytest.raises(ConfigError, match="a custom method; give it to the node, too"):
        handle(EngineProject(model, parts), flower.strategy(mine, model))


def test_methods_for_a_plain_training_function() -> None:
    plain = list_plain_methods()
    assert {"fedavg", "fedavgm", "fedadam", "fedmcsa", "pfedla", "fedper", "fedbn"} <= set(plain)
    assert {
        "fedprox",
        "scaffold",
        "ditto",
        "attune",
        "heurpfedla",
        "fedrod",
        "fedavg_ft",
        "pfedhn",
        "fedamp",
    }.isdisjoint(plain)
