"""The rows of a job over a cluster: Ray Data gives slices of the input to actors, each with an engine.

Ray starts lost actors again and runs their slices once more. The actors read the rows from the input files, and the
driver writes the results.
"""

from __future__ import annotations

import logging
import os
import pickle
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import ray.data
from ray.exceptions import RayError

from nanovllm import cpu_kernel_choice, cpu_machine
from nanovllm.apps.batch.inputs import Inputs, Slice
from nanovllm.apps.batch.replica import Replica, ReplicaSettings
from nanovllm.apps.batch.rows import Row, RowFormat, RowResult
from nanovllm.errors import ConfigError, EngineError, one_line, quoted, told

TRIES = 3  # of a slice: as often as that its actor may be lost
LONGEST_REASON = 300  # characters


@contextmanager
def cluster(address: str | None, verbose: bool) -> Iterator[None]:
    """In this context, the process has joined the cluster at an address.

    None is the cluster that runs on this machine, or else one that is started here and ends with the context. Raises
    ConfigError.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not verbose:
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # the command tells of what failed
    try:
        ray.init(address, log_to_driver=verbose, logging_level=logging.INFO if verbose else logging.ERROR)
    except (RayError, ConnectionError, OSError, RuntimeError, ValueError) as error:
        where = "" if address is None else f" at {quoted(address)}"
        raise ConfigError(f"the cluster of Ray{where} cannot be joined: {told(error)}") from None
    try:
        yield
    finally:
        ray.shutdown()


def resources_each(
    num_replicas: int, num_cpus: float | None, num_gpus: float | None, gpus_wanted: int
) -> dict[str, float]:
    """The num_cpus and num_gpus of each replica: as given, else gpus_wanted GPUs, else an even share of the CPUs.

    Raises ConfigError if no node has room for one replica, for which Ray would wait.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if num_gpus is None:
        num_gpus = gpus_wanted if any(node.get("GPU", 0) for node in nodes) else 0
    if num_cpus is None:
        num_cpus = 1 if num_gpus else cpus_each([int(node.get("CPU", 0)) for node in nodes], num_replicas)
    if not any(node.get("CPU", 0) >= num_cpus and node.get("GPU", 0) >= num_gpus for node in nodes):
        wanted = f"{num_cpus:g} CPUs and {num_gpus:g} GPUs"
        raise ConfigError(f"a replica asks for {wanted}, and no node of the cluster has them: lower --num-cpus or GPUs")
    return {"num_cpus": num_cpus, "num_gpus": num_gpus}


def cpus_each(node_cpus: Sequence[int], num_replicas: int) -> int:
    """The most CPUs that each of the replicas can have, all of them at once; 1 if there is no room for all."""
    most = max(node_cpus, default=1)
    return next((n for n in range(most, 1, -1) if sum(cpus // n for cpus in node_cpus) >= num_replicas), 1)


class SliceReplica:
    """What runs in an actor: one engine, which answers a slice of rows in each call."""

    def __init__(
        self, settings: ReplicaSettings, row_format: RowFormat, inputs: Inputs, machine: str, cpu_kernels: str
    ) -> None:
        """machine, cpu_kernels: of the driver. An actor on a processor of the same kind takes the same kernels."""
        missing = [str(file) for file in inputs.files if not file.is_file()]
        if missing:
            raise ConfigError(f"a node of the cluster has no file {missing[0]!r}: inputs must be there on every node")
        if machine == cpu_machine():
            os.environ["NANOVLLM_CPU_KERNELS"] = cpu_kernels  # before this process first asks for it
        self._replica = Replica(settings)
        self._row_format = row_format
        self._inputs = inputs

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch is one slice; its result is one list of rows and results. Both are pickled."""
        (content,) = batch["item"]
        rows = list(self._inputs.rows(pickle.loads(content), self._row_format.used_columns))
        try:
            results = [pair for pairs in self._replica.answers(rows, self._row_format) for pair in pairs]
        except EngineError:
            # The engine has ended, so this process has to: then Ray starts another one and runs the slice there.
            traceback.print_exc()
            os._exit(1)
        return {"item": [pickle.dumps(results)]}


@dataclass(frozen=True, slots=True)
class Pool:
    """The actors of a job: `num_replicas` of them, each with these resources."""

    settings: ReplicaSettings
    row_format: RowFormat
    inputs: Inputs
    num_replicas: int
    resources: dict[str, float]  # num_cpus and num_gpus

    def answers(self, slices: Iterable[Slice]) -> Iterator[list[tuple[Row, RowResult]]]:
        """The results of each slice, as slices end. A slice whose actor was lost TRIES times has none.

        Raises EngineError if no actor can be started.
        """
        items = [pickle.dumps(part) for part in slices if len(part.done) < part.count]
        if not items:
            return
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        context.scheduling_strategy = "SPREAD"
        context.execution_no_progress_timeout_s = -1  # a slice of long prompts may take hours
        context.max_errored_blocks = -1  # a slice that is lost ends no other
        results = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            SliceReplica,
            fn_constructor_args=(
                self.settings,
                self.row_format,
                self.inputs,
                cpu_machine(),
                cpu_kernel_choice().setting,
            ),
            # One slice at a time: a lost actor takes a try from every slice that waits for it.
            compute=ray.data.ActorPoolStrategy(
                size=min(self.num_replicas, len(items)), max_tasks_in_flight_per_actor=1
            ),
            batch_size=1,
            max_task_retries=TRIES - 1,
            num_cpus=self.resources["num_cpus"],
            num_gpus=self.resources["num_gpus"],
        )
        try:
            for row in results.iter_rows():
                yield pickle.loads(row["item"])
        except RayError as error:
            *_, reason = str(error).strip().splitlines()  # of the actor, after its traceback
            raise EngineError(f"the cluster has no replica: {one_line(reason, LONGEST_REASON)}") from error
