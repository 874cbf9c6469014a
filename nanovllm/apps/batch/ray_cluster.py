"""Joining a cluster of Ray, and what each replica takes of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from nanovllm.errors import ConfigError, quoted, told

OBJECT_STORE_BYTES = 256 << 20  # of a cluster that is started here: rows and results are small


@dataclass(frozen=True, slots=True)
class Resources:
    """What an actor takes of the cluster."""

    num_cpus: float
    num_gpus: float

    def __str__(self) -> str:
        return f"{self.num_cpus:g} CPUs and {self.num_gpus:g} GPUs"


def connect(address: str | None, verbose: bool) -> None:
    """Join the cluster at an address, or, with None, the one that runs on this machine, or else start one here.

    Raises ConfigError.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": verbose, "logging_level": "INFO" if verbose else "ERROR"}
    try:
        if address is None and not os.environ.get("RAY_ADDRESS"):
            try:
                ray.init(address="auto", **options)
            except ConnectionError:  # none runs here
                ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **options)
        else:
            ray.init(address=address, **options)
    except (RayError, ConnectionError, OSError, RuntimeError, ValueError) as error:
        where = "" if address is None else f" at {quoted(address)}"
        raise ConfigError(f"the cluster of Ray{where} cannot be joined: {told(error)}") from None


def disconnect() -> None:
    """Leave the cluster; one that was started here ends."""
    ray.shutdown()


def resources_each(num_replicas: int, num_cpus: float | None, num_gpus: float | None, gpus_wanted: int) -> Resources:
    """What each replica takes: as given, else gpus_wanted GPUs if the cluster has any, else an even share of the CPUs.

    Raises ConfigError if no node has room for one replica.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if num_gpus is None:
        num_gpus = gpus_wanted if any(node.get("GPU", 0) for node in nodes) else 0
    if num_cpus is None:
        cpus = [int(node.get("CPU", 0)) for node in nodes]
        num_cpus = 1 if num_gpus else cpus_each(cpus, num_replicas)
    wanted = Resources(num_cpus, num_gpus)
    if not any(node.get("CPU", 0) >= num_cpus and node.get("GPU", 0) >= num_gpus for node in nodes):
        have = "; ".join(str(Resources(node.get("CPU", 0), node.get("GPU", 0))) for node in nodes)
        raise ConfigError(f"a replica asks for {wanted}, and no node of the cluster has them: the nodes have {have}")
    return wanted


def cpus_each(node_cpus: Sequence[int], num_replicas: int) -> int:
    """The most CPUs that each of the replicas can have, all of them at once; 1 if there is no room for all."""
    most = max(node_cpus, default=1)
    return next((n for n in range(most, 1, -1) if sum(cpus // n for cpus in node_cpus) >= num_replicas), 1)
