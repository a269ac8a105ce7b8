"""Clients on actors of Ray: the numbers of one process, and an error with advice if an actor is lost."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import fedattune
from conformance.table import CASES, Case
from conformance.test_conformance import RUN
from fedattune import ConfigError, Federation, Result, RunError, Settings
from fedattune.cli import main
from fedattune.core.settings import Ray
from fedattune.training.backends.message import WorkerMessage
from remote_runs import same_numbers, trained

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedattune[ray]'")


from fedattune.training.backends.ray import connect_ray, open_ray_backend
from fedattune.training.backends.ray.actor import RayMessage
from fedattune.training.backends.ray.backend import RayTransport
from fedattune.training.backends.ray.cluster import RayCluster, check_ray
from fedattune.training.backends.remote import RemoteBackend

ON_RAY: dict[str, Any] = {"engine": "ray", "ray_actors": 2}
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """One cluster of two cores for all tests, which the package starts and ends; they hand its actors on."""
    import ray

    assert not ray.is_initialized()
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda: 2)
            found = stack.enter_context(connect_ray(Settings(engine="ray")))
        yield found
    assert not ray.is_initialized()


def on_ray(case: Case, federation: Federation, actors: int = 2, **settings: Any) -> Result:
    mine = {"engine": "ray", "ray_actors": actors, **settings}
    with open_ray_backend(Settings(**mine)) as make_backend:
        return trained(case, federation, make_backend, **mine)


def same_models(one: Result, other: Result) -> None:
    assert list(one.models) == list(other.models)
    for here, there in ((one.models, other.models), (one.buffers, other.buffers)):
        for k, v in here.items():
            assert (v.stride(0) == 0) == (there[k].stride(0) == 0), k
            torch.testing.assert_close(there[k], v, atol=1e-12, rtol=0)


KINDS = ("local", "fedmcsa", "fedrep", "scaffold")
"""A method of each kind: `test_remote.py` sends the same messages of all methods to workers in this process."""


@pytest.mark.parametrize("case", [case for case in CASES if case.name in KINDS], ids=lambda case: case.name)
def test_methods_give_the_numbers_of_one_process(case: Case, ragged: Federation, cluster: RayCluster) -> None:
    one, other = trained(case, ragged, None), on_ray(case, ragged)
    same_numbers(one, other)
    same_models(one, other)


def test_a_cluster_of_the_users_own_is_used_and_left(cluster: RayCluster) -> None:
    second = RayCluster(None)  # finds that this process is connected already
    assert second.count_actors(Ray(), 6) == 2
    second.close()
    assert cluster.ray.is_initialized()


def lose_an_actor(monkeypatch: pytest.MonkeyPatch, kind: str, round_: int | None) -> None:
    """Kill the first actor before it gets a message of a kind, in a round."""
    submit = RayTransport._submit

    def killing(self: RayTransport, worker: int, message: RayMessage) -> Any:
        if worker == 0 and (message.head["kind"], message.head.get("round")) == (kind, round_):
            self.ray.kill(self.actors[0])
            with suppress(self.ray.exceptions.RayError):
                while True:  # a kill takes its time
                    self.ray.get(self.actors[0].__ray_ready__.remote())
        return submit(self, worker, message)

    monkeypatch.setattr(RayTransport, "_submit", killing)


@pytest.mark.parametrize(
    ("name", "kind", "round_", "at"),
    [
        ("fedmcsa", "train", 3, "(train, round 3)"),
        pytest.param("scaffold", "models", None, "(models)", marks=pytest.mark.deployed),
    ],
)
def test_a_lost_actor_ends_the_run_with_advice(
    name: str,
    kind: str,
    round_: int | None,
    at: str,
    ragged: Federation,
    cluster: RayCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lose_an_actor(monkeypatch, kind, round_)
    with pytest.raises(RunError, match=rf"lost the actor with clients .* {re.escape(at)}: .*--resume continues"):
        on_ray(BY_NAME[name], ragged)


def test_an_error_on_an_actor_is_that_error(ragged: Federation, cluster: RayCluster) -> None:
    with open_ray_backend(Settings(**ON_RAY)) as make_backend:
        assert make_backend is not None
        made: list[RemoteBackend] = []

        def asks(context: Any, make_payload: Any) -> RemoteBackend:
            made.append(make_backend(context, make_payload))
            return made[0]

        trained(BY_NAME["local"], ragged, asks, **ON_RAY)
        with pytest.raises(KeyError, match="nonsense") as caught:
            made[0].send({0: WorkerMessage({"kind": "nonsense"}), 1: WorkerMessage({"kind": "buffers"})})
        assert "on an actor of Ray" in caught.value.__notes__[0]


@pytest.mark.parametrize(("first", "second"), [(ON_RAY, {}), ({}, ON_RAY)], ids=["leaves", "joins"])
def test_a_run_goes_on_with_another_engine(
    first: dict[str, Any], second: dict[str, Any], ragged: Federation, cluster: RayCluster, tmp_path: Path
) -> None:
    """And those that join after training do so in this process."""

    def fit(out: str, stop: int, **settings: Any) -> Result:
        rounds: list[int] = []
        return fedattune.fit(
            ragged,
            "fedmcsa",
            "mlr",
            out=tmp_path / out,
            resume=(tmp_path / out).exists(),
            callbacks=[fedattune.OnRound(lambda progress: rounds.append(progress.round) or len(rounds) == stop)],
            **(RUN | {"held_out": 1, "seed": 3} | settings),
        )

    whole = fit("whole", 0)
    assert not fit("parts", 2, **first).is_finished
    parts = fit("parts", 0, **second)
    same_numbers(whole, parts)
    same_models(whole, parts)
    for one, other in zip(whole.facts["newcomers"], parts.facts["newcomers"], strict=True):
        assert one == pytest.approx(other)
    assert torch.equal(parts.model(0).state_dict()["1.weight"], Result.load(tmp_path / "parts").models["1.weight"][0])


def test_compression_remembers_on_actors(ragged: Federation, cluster: RayCluster) -> None:
    run = RUN | {"compress": "topk:0.2"}
    one, other = (fedattune.fit(ragged, "fedmcsa", "dnn", **(run | more)) for more in ({}, ON_RAY))
    assert other.bytes_up == one.bytes_up
    same_models(one, other)


def test_settings_of_ray_go_with_ray() -> None:
    with pytest.raises(ConfigError, match="ray_actors: it needs engine ray"):
        Settings.from_keywords(engine="vectorized", ray_actors=2)
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        Settings.from_keywords(engine="ray", ray_address="ray://there:10001")


def test_an_address_where_nothing_answers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fedattune.training.backends.ray.cluster._connections", []
    )  # whoever is connected already asks nobody
    with pytest.raises(ConfigError, match=r"nothing answers at 127\.0\.0\.1:9"):
        check_ray(Settings(engine="ray", ray_address="127.0.0.1:9"))


def test_gpus_that_are_not_there_are_told(ragged: Federation, cluster: RayCluster) -> None:
    with pytest.raises(ConfigError, match="the cluster has 0 GPUs"):
        fedattune.fit(ragged, "fedavg", "mlr", engine="ray", ray_gpus=0.5)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedattune.training.backends.ray.cluster.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'fedattune\[ray\]'"):
        check_ray(Settings(engine="ray"))


def test_processes_do_not_go_with_actors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--engine", "ray", "--processes", "2"]) == 2
    assert "with --engine ray, runs follow one another" in capsys.readouterr().err
