"""Replicas as actors of Ray: each has an engine on a node of the cluster, and is started again where it is lost.

The driver exchanges rows for results with each actor. Two calls are always under way, so that the engine computes while
results travel. An actor that dies, or that does not answer for too long, is replaced; what it may still answer is not
read.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from nanovllm.apps.batch.replica import Replica, ReplicaSettings
from nanovllm.apps.batch.rows import RowRequest, RowResult
from nanovllm.apps.batch.run import Lost, Results
from nanovllm.data.progress import Progress
from nanovllm.errors import ConfigError, EngineError, ModelError, RequestError, one_line, quoted, told

OBJECT_STORE_BYTES = 256 << 20  # of a cluster that is started here: rows and results are small
CALLS = 2  # under way with each actor
EXCHANGE_SECONDS = 0.25  # most that an exchange steps its engine, unless one step takes longer
RESULT_SECONDS = 0.05  # least, if it has results
WAIT_SECONDS = 0.5
WORKER_TIMEOUT = 600.0  # seconds; compiling kernels for the first step can take minutes
LONGEST_REASON = 300  # characters
OWN_ERRORS = (ConfigError, ModelError, EngineError, RequestError)


# ---- the cluster, and what each replica takes of it


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
    if num_gpus > 1 and num_gpus % 1:
        raise ConfigError(f"--num-gpus {num_gpus:g}: a replica takes a part of one GPU or a whole number of them")
    wanted = Resources(num_cpus, num_gpus)
    if not any(node.get("CPU", 0) >= num_cpus and node.get("GPU", 0) >= num_gpus for node in nodes):
        have = "; ".join(str(Resources(node.get("CPU", 0), node.get("GPU", 0))) for node in nodes)
        raise ConfigError(f"a replica asks for {wanted}, and no node of the cluster has them: the nodes have {have}")
    return wanted


def cpus_each(node_cpus: Sequence[int], num_replicas: int) -> int:
    """The most CPUs that each of the replicas can have, all of them at once; 1 if there is no room for all."""
    most = max(node_cpus, default=1)
    return next((n for n in range(most, 1, -1) if sum(cpus // n for cpus in node_cpus) >= num_replicas), 1)


# ---- the replicas


class ReplicaActor:
    """What runs on a node."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._replica: Replica | None = None

    def cpu_kernels(self) -> tuple[str, str]:
        """This node's processor and its choice of CPU kernels, which other replicas take over."""
        from nanovllm import cpu_kernel_choice, cpu_machine  # imports torch

        return cpu_machine(), cpu_kernel_choice().setting

    def load(self, others: tuple[str, str]) -> str:
        """Load the model. Raises what LLM raises. others: `cpu_kernels` of a replica; a sentence if they do not fit."""
        from nanovllm import cpu_machine

        processor, setting = others
        if processor == (own := cpu_machine()):
            os.environ["NANOVLLM_CPU_KERNELS"] = setting  # before this process first asks for it
        self._replica = Replica(self._settings)
        if processor == own or self._replica.llm.config.device == "cuda":
            return ""
        return (
            f"nodes have different processors, {processor.split(';')[0]} and {own.split(';')[0]}, or different kernels:"
            f" on the CPU the last bits of results may differ; NANOVLLM_CPU_ISA pins them"
        )

    def exchange(self, requests: Sequence[RowRequest]) -> tuple[list[RowResult], Progress]:
        """Start rows, run steps for a moment, and return the results that came and how far the others are."""
        replica = self._replica
        start = time.monotonic()
        if replica is None:
            raise EngineError("the replica has no engine: call load first")
        results = replica.add(requests)
        while replica.has_work:
            results += replica.step()
            if time.monotonic() - start >= (RESULT_SECONDS if results else EXCHANGE_SECONDS):
                break
        return results, replica.llm.engine.progress()


@dataclass
class _Worker:
    """One life of a replica. calls: under way, oldest first; to_send: rows for the next one.

    waiting_since: when the oldest call was made or the one before it was answered, on the monotonic clock.
    """

    actor: Any
    loading: Any
    calls: deque[Any] = field(default_factory=deque)
    waiting_since: float = 0.0
    to_send: list[RowRequest] = field(default_factory=list)
    rows: set[int] = field(default_factory=set)  # that it has and has not answered

    @property
    def awaited(self) -> Any:
        """The call whose answer comes next; None if it has nothing to do."""
        return self.loading if self.loading is not None else self.calls[0] if self.calls else None


class RayReplicas:
    """The replicas of a job on a cluster. on_event is called with sentences about them.

    worker_timeout: seconds after which a worker that has rows and has not answered is taken for lost. Loading a model
    may take as long as it takes: no row waits for it.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        num_replicas: int,
        resources: Resources,
        on_event: Callable[[str], None] = lambda sentence: None,
        worker_timeout: float = WORKER_TIMEOUT,
    ) -> None:
        options = {"num_cpus": resources.num_cpus, "num_gpus": resources.num_gpus, "scheduling_strategy": "SPREAD"}
        # As Any: Ray adds the methods of actors at run time.
        actor_class: Any = ray.remote(ReplicaActor)
        self._new_actor = actor_class.options(max_restarts=0, max_task_retries=0, **options).remote
        self._settings = settings
        self._on_event = on_event
        self._worker_timeout = worker_timeout
        self._progress: dict[int, Progress] = {}
        self._cpu_kernels: tuple[int, Any] | None = None  # all replicas' choice: who makes it, and the call
        self._workers: dict[int, _Worker] = {}
        self._workers |= {number: self._start(number) for number in range(num_replicas)}

    def progress(self, step_share: float) -> Progress:
        """As of each replica's last answer."""
        parts = self._progress.values()
        return Progress(*(sum(getattr(part, name.name) for part in parts) for name in fields(Progress)))

    def ready(self) -> Collection[int]:
        return [number for number, worker in self._workers.items() if worker.loading is None]

    def submit(self, replica: int, requests: list[RowRequest]) -> None:
        worker = self._workers[replica]
        worker.to_send += requests
        worker.rows.update(request.index for request in requests)

    def wait(self) -> list[Results | Lost]:
        for worker in self._workers.values():
            self._call(worker)
        awaited = {worker.awaited: number for number, worker in self._workers.items() if worker.awaited is not None}
        if not awaited:
            if not self._workers:
                raise EngineError("no replica is left: see the messages above; --resume goes on")
            return []
        found, _ = ray.wait(list(awaited), num_returns=1, timeout=WAIT_SECONDS)
        if found:  # those that have come meanwhile, too
            found, _ = ray.wait(list(awaited), num_returns=len(awaited), timeout=0)
        events = [event for call in found if (event := self._answer(awaited[call])) is not None]
        return [*events, *self._lost_by_silence()]

    def retire(self, replica: int) -> None:
        self._kill(replica)

    def close(self) -> None:
        for number in list(self._workers):
            self._kill(number)

    # ---- one worker

    def _start(self, number: int) -> _Worker:
        actor = self._new_actor(self._settings)
        # Who makes the choice may be lost before; its successor makes it then.
        if self._cpu_kernels is None or (self._cpu_kernels[0] == number and not self.ready()):
            self._cpu_kernels = (number, actor.cpu_kernels.remote())
        return _Worker(actor, actor.load.remote(self._cpu_kernels[1]))

    def _call(self, worker: _Worker) -> None:
        """Keep calls under way while the worker has rows."""
        while worker.loading is None and worker.rows and len(worker.calls) < CALLS:
            if not worker.calls:
                worker.waiting_since = time.monotonic()
            worker.calls.append(worker.actor.exchange.remote(worker.to_send))
            worker.to_send = []

    def _answer(self, number: int) -> Results | Lost | None:
        worker = self._workers[number]
        try:
            answer = ray.get(worker.awaited)
        except RayError as error:
            return self._failed(number, error)
        if worker.loading is not None:
            worker.loading = None
            if answer:
                self._on_event(answer)
            return None
        worker.calls.popleft()
        worker.waiting_since = time.monotonic()
        results, self._progress[number] = answer
        worker.rows.difference_update(result.index for result in results)
        return Results(number, results)

    def _failed(self, number: int, error: RayError) -> Lost:
        cause = error.cause if isinstance(error, RayTaskError) else None
        reason = told(cause) if cause is not None else one_line(str(error), LONGEST_REASON)
        if self._workers[number].loading is None or not isinstance(cause, OWN_ERRORS):
            return self._replace(number, reason)
        self._kill(number)  # another try to load would end in the same way
        if not self._workers:
            raise cause
        self._on_event(f"replica {number} is given up: {one_line(str(cause), LONGEST_REASON)}")
        return Lost(number, reason)

    def _lost_by_silence(self) -> list[Lost]:
        """Replace the workers that have not answered for `worker_timeout`: they may hang for ever."""
        latest = time.monotonic() - self._worker_timeout
        silent = [number for number, worker in self._workers.items() if worker.calls and worker.waiting_since < latest]
        return [self._replace(number, f"it has not answered for {self._worker_timeout:g} s") for number in silent]

    def _replace(self, number: int, reason: str) -> Lost:
        """End a worker and start another one in its place."""
        self._kill(number)
        self._workers[number] = self._start(number)
        return Lost(number, reason)

    def _kill(self, number: int) -> None:
        worker = self._workers.pop(number, None)
        self._progress.pop(number, None)
        if worker is not None:
            ray.kill(worker.actor)
