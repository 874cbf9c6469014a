"""One tensor-parallel rank: a process that loads its part of the model and runs the steps that the engine sends."""

from __future__ import annotations

import logging
import logging.handlers
import os
import queue
import select
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.data.batch import Batch, LogitsProcessors, SamplingRow
from nanovllm.device import create_device
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.errors import ConfigError
from nanovllm.features.distributed.group import ProcessGroup
from nanovllm.features.distributed.messages import (
    Channel,
    Close,
    Done,
    Execute,
    Failure,
    Hello,
    Log,
    Process,
    Progress,
    Ready,
)
from nanovllm.layers.parallel import RankGroup
from nanovllm.models.spec import DecoderSpec
from nanovllm.ops import kernel_choice

LOOPBACK = "127.0.0.1"

MakeRunner = Callable[[EngineConfig, DecoderSpec, RankGroup | None], ModelRunner]  # can be pickled


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What a rank has to know before it can talk to the others.

    spec: of the whole model. A rank does not read the config itself: Transformers' class of a single family can load a
    thousand modules, some 80 MB in every rank. store_host, store_port: of the TCPStore through which the ranks find
    each other. threads: of this rank. cpu_kernels: of the process that starts the rank, a `KernelChoice.setting`.
    make_runner: assembles the runner of a rank.
    """

    config: EngineConfig
    spec: DecoderSpec
    rank: int
    size: int
    local_rank: int
    local_size: int
    store_host: str
    store_port: int
    threads: int
    cpu_kernels: str
    log_level: int
    make_runner: MakeRunner


def run_rank(connection: Connection, setup: RankSetup) -> None:
    """The main function of a rank's process. Returns when the engine closes it; an error ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C interrupts the engine, which then closes its ranks
    channel, closed = Channel(connection), threading.Event()
    threading.Thread(target=_end_with, args=(connection, closed), name="engine-watch", daemon=True).start()
    try:
        channel.send(Hello(setup.rank))
        _send_logs(channel, setup)
        _serve(channel, setup)
    except BaseException as error:
        try:
            channel.send(Failure.of(setup.rank, error))
        finally:
            os._exit(1)  # at once: threads of a communicator could wait for the other ranks
    closed.set()


def _end_with(connection: Connection, closed: threading.Event) -> None:
    """End this process when the engine's end of the connection is closed, as it is after kill -9 of the engine."""
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
        self._channel.send(Log(record))


def _send_logs(channel: Channel, setup: RankSetup) -> None:
    """Log through the engine; ranks after the first would repeat what it says, so that only their errors count."""
    logger = logging.getLogger("nanovllm")
    logger.handlers, logger.propagate = [_ToEngine(channel)], False
    logger.setLevel(setup.log_level if setup.rank == 0 else logging.ERROR)


def _serve(channel: Channel, setup: RankSetup) -> None:
    torch.set_num_threads(setup.threads)
    config = with_device(setup)
    group = ProcessGroup(setup.rank, setup.size, setup.local_size, channel)
    # Before this process first asks for it: the ranks' sums fit together only with the same instruction sets.
    os.environ[kernel_choice.VARIABLE] = kernel_choice.agreed(group.exchange(setup.cpu_kernels))
    join(config, setup)
    runner = setup.make_runner(config if setup.rank == 0 else replace(config, trace=None), setup.spec, group)
    facts = (runner.spec, runner.dtype, runner.sizing, runner.plan, runner.num_swap_blocks)
    channel.send(Ready(*facts, runner.kv_stats()))
    while isinstance(message := channel.receive(), Execute):
        _run_step(channel, runner, message, is_first=setup.rank == 0)
    assert isinstance(message, Close)
    logging.getLogger("nanovllm").handlers.clear()
    runner.close()
    dist.destroy_process_group()


def _run_step(channel: Channel, runner: ModelRunner, message: Execute, is_first: bool) -> None:
    if not is_first:
        runner.execute(message.batch)
        channel.send(Done(message.step))
        return
    runner.watch_steps((lambda share: channel.send(Progress(share, runner.kv_stats()))) if message.watched else None)
    result = runner.execute(_with_processors(message.batch, channel))
    channel.send(Done(message.step, result, runner.kv_stats(), runner.link_busy()))


def _with_processors(batch: Batch, channel: Channel) -> Batch:
    """The batch, in which the engine applies the callers' logits processors: these functions stay in its process."""

    def ask(sequence: int, sample: int, _: object, logits: Tensor) -> Tensor:
        channel.send(Process(sequence, sample, logits.cpu()))
        answer = channel.receive()
        if answer.error is not None:
            raise answer.error
        processed: Tensor = answer.logits
        return processed

    def asking(sequence: int, sample: int, row: SamplingRow) -> SamplingRow:
        if row.processors is None:
            return row
        return replace(row, processors=LogitsProcessors([(partial(ask, sequence, sample), False)], (), ()))

    return replace(
        batch,
        sequences=[
            replace(seq, samples=[asking(i, j, row) for j, row in enumerate(seq.samples)])
            if any(row.processors is not None for row in seq.samples)
            else seq
            for i, seq in enumerate(batch.sequences)
        ],
    )


def with_device(setup: RankSetup) -> EngineConfig:
    """The configuration with the device that this rank uses: on CUDA, the GPU of its own number."""
    config, count = setup.config, torch.cuda.device_count()
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
    on_cuda, timeout = config.device == "cuda", timedelta(seconds=config.distributed_timeout_seconds)
    if setup.store_host == LOOPBACK:  # all ranks are on this machine, whose own name may not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore(setup.store_host, setup.store_port, is_master=False, timeout=timeout, wait_for_workers=False)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=dist.PrefixStore("nanovllm", store),
        rank=setup.rank,
        world_size=setup.size,
        timeout=timeout,
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_cuda else None,
    )
