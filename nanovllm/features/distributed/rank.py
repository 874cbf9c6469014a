"""One tensor-parallel rank: a process that loads its part of the model and runs the steps that the engine sends."""

from __future__ import annotations

import io
import logging
import logging.handlers
import os
import pickle
import queue
import select
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.data.batch import LogitsProcessors, StepResult
from nanovllm.data.network import Network
from nanovllm.device import Busy, create_device
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.errors import ConfigError, EngineError, ModelError, told
from nanovllm.features.distributed.group import CollectiveError, ProcessGroup
from nanovllm.kvcache.base import KVStats
from nanovllm.layers.parallel import RankGroup
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.sizing import KVPlan
from nanovllm.models.network_config import NetworkConfig
from nanovllm.ops import kernel_choice
from nanovllm.ops.cpu_kernels import cpu_kernel_choice

LOOPBACK = "127.0.0.1"
LOAD_TIME = timedelta(days=1)  # most, until all ranks have loaded their weights

MakeRunner = Callable[[EngineConfig, NetworkConfig, RankGroup | None], ModelRunner]  # can be pickled


class RankPart(Protocol):
    """What a feature does in every rank. The engine calls it between steps, and it reports from any thread."""

    facts: bytes  # what the engine has to know of it before the first step

    def close(self) -> None:
        """End all work. Safe to call twice."""
        ...


# From the rank's number and what takes reports. Can be pickled.
MakePart = Callable[[EngineConfig, ModelRunner, int, Callable[[Any], None]], RankPart]


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What a rank has to know before it can talk to the others.

    A rank does not read the model's config: Transformers' class of a single family can load a thousand modules, some
    80 MB in every rank.
    """

    config: EngineConfig
    network: NetworkConfig  # of the whole model
    make_runner: MakeRunner
    rank: int
    local_rank: int  # among the ranks of its machine
    local_size: int
    store_host: str  # of the TCPStore through which the ranks find each other
    store_port: int
    make_part: MakePart | None = None
    # of the process that starts the rank; the ranks of a machine divide its threads
    threads: int = field(default_factory=torch.get_num_threads)
    cpu_kernels: str = field(default_factory=lambda: cpu_kernel_choice().setting)
    log_level: int = field(default_factory=lambda: logging.getLogger("nanovllm").getEffectiveLevel())

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.config.tensor_parallel_size

    def connect(self, timeout: timedelta) -> dist.Store:
        """The store of the ranks. timeout: most that it waits for a value."""
        return of_attempt(
            dist.TCPStore(self.store_host, self.store_port, is_master=False, timeout=timeout, wait_for_workers=False)
        )


def of_attempt(store: dist.Store) -> dist.Store:
    """The part of torchrun's store that this attempt uses: what an earlier one has left in it is out of date."""
    return dist.PrefixStore(f"nanovllm {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


# ---- messages over a pipe or a socket: plain pickles, and no tensors shared


@dataclass(frozen=True, slots=True)
class Execute:
    """Run a step. None in place of a message ends the rank."""

    batch: bytes  # pickled by `BatchPickler`
    watched: bool  # the first rank reports the progress of the step


@dataclass(frozen=True, slots=True)
class Tell:
    """A call of the rank's part, which gets it as the argument."""

    command: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Reported:
    """What the rank's part reports."""

    report: Any


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded. The facts are those of the rank."""

    network: Network
    dtype: torch.dtype
    sizing: KVSizing
    plan: KVPlan
    num_swap_blocks: int
    stats: KVStats
    part_facts: bytes


@dataclass(frozen=True, slots=True)
class Done:
    """The first rank has finished the step."""

    result: StepResult
    stats: KVStats
    busy: Busy


@dataclass(frozen=True, slots=True)
class Progress:
    """The share of the step in progress that is done."""

    share: float
    stats: KVStats


@dataclass(frozen=True, slots=True)
class Process:
    """Logits for a caller's logits processors. The answer is `Processed`."""

    index: int  # in `BatchPickler.kept`
    logits: Tensor  # [vocab]


@dataclass(frozen=True, slots=True)
class Processed:
    """What the logits processors made of a row's logits, or their error."""

    logits: Tensor | None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that ended a rank."""

    kind: type[Exception]  # one of the engine's own
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        own = next((kind for kind in (CollectiveError, ConfigError, ModelError) if isinstance(error, kind)), None)
        text = "".join(traceback.format_exception(error))
        return cls(own or EngineError, str(error) if own else told(error), text)


class Channel:
    """Messages over a connection. Any thread may send; one thread receives."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        self.send_packed(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def send_packed(self, message: bytes) -> None:
        """Send a message that is pickled already."""
        with self._lock:
            self.connection.send_bytes(message)

    def receive(self) -> Any:
        """The next message. Raises EOFError or OSError if the other side has ended."""
        return pickle.loads(self.connection.recv_bytes())


class BatchPickler(pickle.Pickler):
    """Pickles a batch without the callers' logits processors, which stay in the engine's process, in `kept`."""

    def __init__(self, file: io.BytesIO, kept: list[LogitsProcessors]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._kept = kept

    def persistent_id(self, value: object) -> int | None:
        if not isinstance(value, LogitsProcessors):
            return None
        self._kept.append(value)
        return len(self._kept) - 1


class BatchUnpickler(pickle.Unpickler):
    """Unpickles a batch. In place of logits processors it has a function that asks the engine to apply them."""

    def __init__(self, batch: bytes, channel: Channel) -> None:
        super().__init__(io.BytesIO(batch))
        self._channel = channel

    def persistent_load(self, index: int) -> LogitsProcessors:
        return LogitsProcessors([(partial(self._ask, index), False)], (), ())

    def _ask(self, index: int, _: object, logits: Tensor) -> Tensor:
        self._channel.send(Process(index, logits.cpu()))
        answer = self._channel.receive()
        if answer.error is not None:
            raise answer.error
        processed: Tensor = answer.logits
        return processed


# ---- the process


def run_rank(connection: Connection, setup: RankSetup) -> None:
    """The main function of a rank's process. Returns when the engine closes it; an error ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C interrupts the engine, which then closes its ranks
    channel = Channel(connection)
    closed = threading.Event()
    threading.Thread(target=_end_with, args=(connection, closed), name="engine-watch", daemon=True).start()
    try:
        _send_logs(channel, setup)
        _serve(channel, setup)
    except BaseException as error:
        try:
            channel.send(Failure.of(error))
        finally:
            os._exit(1)  # at once: threads of a communicator could wait for the other ranks
    closed.set()


def _end_with(connection: Connection, closed: threading.Event) -> None:
    """End this process when the engine's end of the connection closes, also because the engine was killed."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    poll.poll()
    if not closed.is_set():
        os._exit(1)


class _ToEngine(logging.handlers.QueueHandler):
    """Sends log records to the engine, whose process has the user's handlers."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(queue.SimpleQueue())
        self._channel = channel

    def enqueue(self, record: logging.LogRecord) -> None:
        self._channel.send(record)


def _send_logs(channel: Channel, setup: RankSetup) -> None:
    """Log through the engine. Of ranks after the first only errors count: the rest repeats what the first one says."""
    logger = logging.getLogger("nanovllm")
    logger.handlers = [_ToEngine(channel)]
    logger.propagate = False
    logger.setLevel(setup.log_level if setup.rank == 0 else logging.ERROR)


def _serve(channel: Channel, setup: RankSetup) -> None:
    torch.set_num_threads(max(1, setup.threads // setup.local_size))
    config = with_device(setup)
    group = ProcessGroup(setup.rank, setup.size, setup.local_size, setup.connect(LOAD_TIME))
    # The ranks' sums fit together only with the same instruction sets.
    kernel_choice.pin(kernel_choice.agreed(group.exchange(setup.cpu_kernels)))
    join(config, setup)
    runner = setup.make_runner(config if setup.rank == 0 else replace(config, trace=None), setup.network, group)
    reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
    part = None
    if setup.make_part is not None:
        threading.Thread(target=_send_reports, args=(channel, reports), name="reports", daemon=True).start()
        part = setup.make_part(config, runner, setup.rank, reports.put)
    ready = Ready(
        network=runner.network,
        dtype=runner.dtype,
        sizing=runner.sizing,
        plan=runner.plan,
        num_swap_blocks=runner.num_swap_blocks,
        stats=runner.kv_stats(),
        part_facts=b"" if part is None else part.facts,
    )
    channel.send(ready)
    while (message := channel.receive()) is not None:
        if isinstance(message, Tell):
            message.command(part)
            continue
        batch = BatchUnpickler(message.batch, channel).load()
        if setup.rank == 0:
            report = (lambda share: channel.send(Progress(share, runner.kv_stats()))) if message.watched else None
            runner.watch_steps(report)
        result = runner.execute(batch)
        if setup.rank == 0:
            channel.send(Done(result, runner.kv_stats(), runner.link_busy()))
    if part is not None:
        part.close()
        reports.put(None)
    logging.getLogger("nanovllm").handlers.clear()
    runner.close()
    dist.destroy_process_group()


def _send_reports(channel: Channel, reports: queue.SimpleQueue[Any]) -> None:
    """Send reports until one is None, in a thread of its own, which alone waits while the engine does not receive."""
    with suppress(OSError):  # the engine has ended, and so will this process
        while (report := reports.get()) is not None:
            channel.send(Reported(report))


def with_device(setup: RankSetup) -> EngineConfig:
    """The configuration with the device of this rank. On CUDA it is the GPU of its local number."""
    config = setup.config
    count = torch.cuda.device_count()
    if count and config.device != "cpu":
        if setup.local_rank >= count:
            raise ConfigError(
                f"tensor_parallel_size={setup.size}: rank {setup.rank} needs a GPU of its own, and this machine has "
                f"{count}; lower it, use device='cpu', or start ranks on several machines with torchrun"
            )
        torch.cuda.set_device(setup.local_rank)
    device = create_device(config.device)
    device.close()
    return replace(config, device=device.torch_device.type)


def join(config: EngineConfig, setup: RankSetup) -> None:
    """Join the process group of all ranks."""
    on_cuda = config.device == "cuda"
    timeout = timedelta(seconds=config.distributed_timeout_seconds)
    if setup.store_host == LOOPBACK:  # all ranks are on this machine, whose own name may not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=setup.connect(timeout),
        rank=setup.rank,
        world_size=setup.size,
        timeout=timeout,
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_cuda else None,
    )
