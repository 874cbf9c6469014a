"""Replicas on Ray, without a cluster: whose CPU kernels they use, and which GPUs; the rest: test_batch_cluster.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'nanovllm[ray]'")

from nanovllm.apps.batch import ray_replicas
from nanovllm.apps.batch.ray_replicas import RayReplicas, Resources, resources_each
from nanovllm.apps.batch.replica import ReplicaSettings
from nanovllm.errors import ConfigError


class Actor:
    """An actor that has loaded as soon as it is asked to."""

    def __init__(self) -> None:
        self.cpu_kernels = SimpleNamespace(remote=lambda: self)  # whose choice it is
        self.load = SimpleNamespace(remote=self._load)

    def _load(self, choice_of: Actor) -> Actor:
        self.choice_of = choice_of
        return self


def test_all_replicas_take_over_the_cpu_kernels_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first one, or of its successor if it is lost before any replica has loaded."""
    actors: list[Actor] = []

    def start(settings: ReplicaSettings) -> Actor:
        actors.append(Actor())
        return actors[-1]

    def wait(calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return [call for call in calls if call is actors[-1]], []

    made = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=start))
    ray = SimpleNamespace(remote=lambda kind: made, wait=wait, get=lambda call: "", kill=lambda actor: None)
    monkeypatch.setattr(ray_replicas, "ray", ray)
    replicas = RayReplicas(ReplicaSettings("tiny"), 2, Resources(1, 0))
    replicas._replace(0, "lost")
    replicas._replace(1, "its choice is lost")
    first, _, successor, _ = actors
    assert [actor.choice_of for actor in actors] == [first, first, successor, successor]
    replicas.wait()  # the last one has loaded
    assert list(replicas.ready()) == [1]
    replicas._replace(0, "lost again")
    assert actors[-1].choice_of is successor  # a call's answer outlives the actor


def test_a_replica_takes_a_part_of_a_gpu_or_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0}}
    monkeypatch.setattr(ray_replicas, "ray", SimpleNamespace(nodes=lambda: [node]))
    assert [resources_each(2, None, gpus, 1).num_gpus for gpus in (None, 0.5, 2)] == [1, 0.5, 2]
    with pytest.raises(ConfigError, match=r"--num-gpus 1\.5: a replica takes a part of one GPU or a whole number"):
        resources_each(2, None, 1.5, 1)
