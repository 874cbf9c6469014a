"""Replicas on Ray, without a cluster: what becomes of the rows of a worker that does not answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'nanovllm[ray]'")

from nanovllm.apps.batch import ray_replicas
from nanovllm.apps.batch.ray_replicas import RayReplicas, Resources
from nanovllm.apps.batch.replica import ReplicaSettings
from nanovllm.apps.batch.rows import RowRequest, failed_result
from nanovllm.apps.batch.run import Lost, Results
from nanovllm.data.progress import Progress

TIMEOUT = 30.0


class Call:
    """A call of an actor. answer: None until it is there."""

    def __init__(self, requests: list[RowRequest] | None = None) -> None:
        self.requests = requests
        self.answer: Any = None

    def end(self) -> None:
        """Answer with a result for each row."""
        results = [failed_result(request.index, "no engine") for request in self.requests or ()]
        self.answer = (results, Progress()) if self.requests is not None else ""


class Actor:
    """An actor whose calls end when the test says so."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.is_killed = False
        self.cpu_kernels = SimpleNamespace(remote=lambda: self)  # whose choice it is
        self.load = SimpleNamespace(remote=self._load)
        self.exchange = SimpleNamespace(remote=lambda requests: self._called(Call(requests)))

    def _load(self, choice_of: Actor) -> Call:
        self.choice_of = choice_of
        return self._called(Call())

    def _called(self, call: Call) -> Call:
        self.calls.append(call)
        return call


class Ray:
    """What `RayReplicas` uses of Ray, and a clock."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.now = 1000.0

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self._start))

    def _start(self, settings: ReplicaSettings) -> Actor:
        self.actors.append(Actor())
        return self.actors[-1]

    def wait(self, calls: list[Call], num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        self.now += timeout
        return [call for call in calls if call.answer is not None], []

    def get(self, call: Call) -> Any:
        return call.answer

    def kill(self, actor: Actor) -> None:
        actor.is_killed = True


def wait_for(replicas: RayReplicas, ray: Ray, seconds: float) -> list[Results | Lost]:
    """What happens within so many seconds of the clock."""
    events, end = [], ray.now + seconds
    while ray.now < end:
        events += replicas.wait()
        ray.now += 0.1  # an idle job does not wait for Ray
    return events


def test_a_worker_that_does_not_answer_is_replaced_and_its_rows_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray()
    monkeypatch.setattr(ray_replicas, "ray", ray)
    monkeypatch.setattr(ray_replicas, "time", SimpleNamespace(monotonic=lambda: ray.now))
    replicas = RayReplicas(ReplicaSettings("tiny"), 1, Resources(1, 0), worker_timeout=TIMEOUT)
    hanging = ray.actors[0]
    monkeypatch.setattr(replicas, "_patient_until", None)
    assert wait_for(replicas, ray, 10 * TIMEOUT) == []  # loading may take as long as it takes
    hanging.calls[0].end()
    assert wait_for(replicas, ray, 2.0) == [] and list(replicas.ready()) == [0]
    assert wait_for(replicas, ray, 1.0) == []

    replicas.submit(0, [RowRequest(index, prompt="a") for index in (3, 4)])
    assert wait_for(replicas, ray, TIMEOUT - 5) == []
    hanging.calls[1].end()  # an answer begins the time anew
    assert [event.replica for event in wait_for(replicas, ray, 1.0) if isinstance(event, Results)] == [0]
    replicas.submit(0, [RowRequest(5, prompt="b")])
    assert wait_for(replicas, ray, TIMEOUT - 5) == [] and not hanging.is_killed
    assert wait_for(replicas, ray, 10.0) == [Lost(0, f"it has not answered for {TIMEOUT:g} s")]
    assert hanging.is_killed and len(ray.actors) == 2 and not list(replicas.ready())

    hanging.calls[-1].end()  # too late: it is not read
    ray.actors[1].calls[0].end()
    assert wait_for(replicas, ray, 1.0) == [] and list(replicas.ready()) == [0]


def test_all_replicas_take_over_the_cpu_kernels_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first one, or of its successor if it is lost before any replica has loaded."""
    ray = Ray()
    monkeypatch.setattr(ray_replicas, "ray", ray)
    monkeypatch.setattr(ray_replicas, "time", SimpleNamespace(monotonic=lambda: ray.now))
    replicas = RayReplicas(ReplicaSettings("tiny"), 2, Resources(1, 0), worker_timeout=TIMEOUT)
    replicas._replace(0, "lost")
    replicas._replace(1, "its choice is lost")
    first, _, successor, second = ray.actors
    assert [actor.choice_of for actor in ray.actors] == [first, first, successor, successor]
    second.calls[0].end()
    wait_for(replicas, ray, 1.0)
    replicas._replace(0, "lost again")
    assert ray.actors[-1].choice_of is successor  # a call's answer outlives the actor
