"""The executor of several ranks: it starts them, sends every step to all of them, and ends all if one fails.

Every rank is a process of its own, the first one too. So a rank that waits for a dead one does not block the engine:
that notices at once that a process has ended, kills the others and raises the error of the rank that failed first.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import selectors
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.data.batch import Batch, LogitsProcessors, StepResult
from nanovllm.device import Busy
from nanovllm.errors import EngineError
from nanovllm.features.distributed import launch
from nanovllm.features.distributed.group import CollectiveError
from nanovllm.features.distributed.launch import Rank
from nanovllm.features.distributed.rank import (
    BatchPickler,
    Done,
    Execute,
    Failure,
    MakePart,
    MakeRunner,
    Process,
    Processed,
    Progress,
    Ready,
    Reported,
    Tell,
)
from nanovllm.kvcache.base import KVStats
from nanovllm.layers.logits import process
from nanovllm.models.network_config import NetworkConfig

logger = logging.getLogger(__name__)

CAUSE_SECONDS = 1.0  # to wait for the cause: a rank that fails because of another one often says so first
CLOSE_SECONDS = 10.0


class RankTraceback(Exception):
    """The traceback of an error in a rank's process, as the cause of the engine's error."""

    def __init__(self, text: str) -> None:
        super().__init__(f"\n{text}")


class TensorParallelExecutor:
    """As `ModelRunner`, with `tensor_parallel_size` ranks. An error in a rank ends all of them."""

    def __init__(
        self, config: EngineConfig, network: NetworkConfig, make_runner: MakeRunner, make_part: MakePart | None = None
    ) -> None:
        """Start the ranks and wait until they have loaded the model.

        network: of the whole model. make_runner: assembles the runner of each rank. make_part: what a feature does
        there.
        Raises ConfigError and ModelError as a rank does, and EngineError for everything else.
        """
        self._size = config.tensor_parallel_size
        network.check_ranks(self._size)
        self._patience = config.distributed_timeout_seconds
        self._kept: list[LogitsProcessors] = []  # of the step in progress, which the ranks do not get
        self._reported: deque[tuple[int, Any]] = deque()  # by parts, each with the number of its rank
        self._is_ready = False  # all ranks have loaded the model
        self._error: EngineError | None = None  # why no step can run any more
        self._on_layer: Callable[[float], None] | None = None
        self._busy = Busy()
        self._ranks, store = launch.start_ranks(config, network, make_runner, make_part)
        self._selector = selectors.DefaultSelector()
        for rank in self._ranks:
            self._selector.register(rank.channel.connection.fileno(), selectors.EVENT_READ, (rank, False))
            if rank.process is not None:
                self._selector.register(rank.process.sentinel, selectors.EVENT_READ, (rank, True))
        self._end = weakref.finalize(self, _end_ranks, os.getpid(), self._ranks, self._selector, store)
        try:
            self._wait_until_ready()
        except BaseException:
            self._end()
            raise

    # ---- what the engine asks for

    def execute(self, batch: Batch) -> StepResult:
        """Run one step on all ranks. Raises EngineError if a rank fails, and from then on.

        After an interrupt, such as Ctrl-C, the ranks first end the step. A second one ends them.
        """
        self._check_open()
        self._send_all(Execute(self._packed(batch), self._on_layer is not None))
        try:
            return self._result(is_wanted=True)
        except Exception:
            raise
        except BaseException:
            try:
                self._result(is_wanted=False)
            except BaseException:
                self._ended("a step was interrupted twice")
                raise
            raise

    def check_health(self) -> None:
        """Raise EngineError if no step can run any more, also if a rank has failed since the last step."""
        self._check_open()
        for _ in self._arrived(0.0):
            pass

    def advise(self, num_tokens: int) -> str:
        return self.sizing.advice(num_tokens)

    def watch_steps(self, on_layer: Callable[[float], None] | None) -> Callable[[float], None] | None:
        """See `LLM.watch_steps`."""
        before = self._on_layer
        self._on_layer = on_layer
        return before

    def kv_stats(self) -> KVStats:
        """Of the first rank, as it said last."""
        return self._stats

    def link_busy(self) -> Busy:
        """Of the first rank."""
        return self._busy

    def close(self) -> None:
        """End the ranks. Safe to call twice."""
        if self._error is None:
            self._error = EngineError("the engine is closed: make a new LLM")
            for rank in self._ranks:
                with suppress(OSError):
                    rank.channel.send(None)
            deadline = time.monotonic() + CLOSE_SECONDS
            for rank in self._ranks:
                _wait_for_end(rank, deadline)
        self._end()

    # ---- what a feature does in every rank

    def tell(self, command: Callable[[Any], None]) -> None:
        """Call the feature's part of every rank, after all so far and before the next step. The call can be pickled."""
        if self._error is None:
            self._send_all(Tell(command))

    def reports(self, seconds: float) -> Iterator[tuple[int, Any]]:
        """What the parts have reported, each with the number of its rank. Waits at most `seconds` for the first.

        Raises EngineError if a rank fails.
        """
        self._check_open()
        while True:
            for _ in self._arrived(0.0 if self._reported else seconds):
                pass  # it keeps the reports
            if not self._reported:
                return
            seconds = 0.0
            while self._reported:
                yield self._reported.popleft()

    # ---- messages

    def _send_all(self, message: Any) -> None:
        try:
            packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            for rank in self._ranks:
                with suppress(OSError):  # its end is noticed when its answer is awaited
                    rank.channel.send_packed(packed)
        except BaseException:  # such as KeyboardInterrupt: some ranks have got the message, others have not
            self._ended("a message to the ranks was interrupted")
            raise

    def _packed(self, batch: Batch) -> bytes:
        """The batch as the ranks unpickle it. Logits processors stay here."""
        self._kept = []
        if not any(row.processors is not None for seq in batch.sequences for row in seq.samples):
            return pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)
        file = io.BytesIO()
        BatchPickler(file, self._kept).dump(batch)
        return file.getvalue()

    def _arrived(self, seconds: float | None = None) -> Iterator[tuple[Rank, Any]]:
        """The messages of a step that have come, or else the next ones within some seconds; None: any time.

        Log records and reports are handled here. Raises the error of a rank that fails.
        """
        for key, _ in self._selector.select(seconds):
            rank, has_ended = key.data
            message = _last_words(rank) if has_ended else _received(rank)
            if message is None or isinstance(message, Failure):
                raise self._failed(rank, message)
            if isinstance(message, logging.LogRecord):
                logging.getLogger(message.name).handle(message)
            elif isinstance(message, Reported):
                self._reported.append((rank.index, message.report))
            else:
                yield rank, message

    def _wait_until_ready(self) -> None:
        num_ready = 0
        self.part_facts = [b""] * self._size
        while num_ready < self._size:
            for rank, message in self._arrived():
                assert isinstance(message, Ready)
                num_ready += 1
                self.part_facts[rank.index] = message.part_facts
                if rank.index == 0:
                    self.network = message.network
                    self.dtype = message.dtype
                    self._stats = message.stats
                    self.sizing = message.sizing
                    self.plan = message.plan
                    self.num_swap_blocks = message.num_swap_blocks
        self._is_ready = True

    def _report(self, message: Progress) -> None:
        """Call `on_layer`. An error in it is logged and does not fail the step."""
        self._stats = message.stats
        try:
            if self._on_layer is not None:
                self._on_layer(message.share)
        except Exception:
            self._on_layer = None
            logger.exception("the function that watches the steps has failed, and is not called again")

    def _result(self, is_wanted: bool) -> StepResult:
        """Wait for the result of the step in progress. is_wanted: False if the step was interrupted."""
        while True:
            for rank, message in self._arrived():
                if isinstance(message, Done):
                    self._stats = message.stats
                    self._busy = message.busy
                    return message.result
                if isinstance(message, Progress) and is_wanted:
                    self._report(message)
                elif isinstance(message, Process):
                    self._process(rank, message, is_wanted)

    def _process(self, rank: Rank, message: Process, is_wanted: bool) -> None:
        """Apply logits processors and answer the rank, also if the caller's function is interrupted."""
        answer = Processed(None, RuntimeError("the step was interrupted"))
        try:
            if is_wanted:
                answer = _processed(message.logits, self._kept[message.index])
        finally:
            with suppress(OSError):  # its end is noticed when its next message is awaited
                rank.channel.send(answer)

    # ---- failures

    def _failed(self, rank: Rank, failure: Failure | None) -> Exception:
        """The error to raise because of a failure, or of the end of a rank without one. Ends all ranks."""
        failures = {rank.index: failure}
        deadline = time.monotonic() + CAUSE_SECONDS
        while (left := deadline - time.monotonic()) > 0 and not any(map(_is_cause, failures.values())):
            for key, _ in self._selector.select(left):
                other, has_ended = key.data
                message = _last_words(other) if has_ended else _received(other)
                if message is None or isinstance(message, Failure):
                    failures[other.index] = failures.get(other.index) or message
        index = next((index for index, other in failures.items() if _is_cause(other)), rank.index)
        cause = failures[index]
        if cause is None:
            return self._ended(_how_it_ended(self._ranks[index], self._is_ready))
        if cause.kind is CollectiveError:
            silent = [str(rank.index) for rank in self._ranks if rank.index not in failures]
            answers = f"; rank {', '.join(silent)} has not answered for {self._patience:g} s" if silent else ""
            return self._ended(f"{cause.message}{answers}", cause)
        if issubclass(cause.kind, EngineError):
            return self._ended(f"rank {index} has failed: {cause.message}", cause)
        self._ended(cause.message, cause)
        error = cause.kind(cause.message)
        error.__cause__ = RankTraceback(cause.traceback)
        return error

    def _ended(self, message: str, failure: Failure | None = None) -> EngineError:
        """The error of an engine without ranks, which all later steps raise too."""
        self._error = EngineError(f"{message}; the engine has ended: make a new LLM")
        self._error.__cause__ = None if failure is None else RankTraceback(failure.traceback)
        self._end()
        return self._error

    def _check_open(self) -> None:
        if self._error is not None:
            raise EngineError(str(self._error)) from self._error.__cause__


def _wait_for_end(rank: Rank, deadline: float) -> None:
    """Wait until a rank that was told to end has ended. One of torchrun fails if its connection is closed before."""
    if rank.process is not None:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        return
    while rank.channel.connection.poll(max(0.0, deadline - time.monotonic())):
        if _received(rank) is None:
            return


def _received(rank: Rank) -> Any | None:
    """The next message of a rank, or None if it has ended."""
    try:
        return rank.channel.receive()
    except (EOFError, OSError):
        return None


def _last_words(rank: Rank) -> Failure | None:
    """The failure that a rank has sent before its process ended, if any."""
    with suppress(EOFError, OSError):
        while rank.channel.connection.poll():
            if isinstance(message := rank.channel.receive(), Failure):
                return message
    return None


def _is_cause(failure: Failure | None) -> bool:
    """Whether a failure may be the cause of the others. None, the end of a process without a word, may be too."""
    return failure is None or failure.kind is not CollectiveError


def _how_it_ended(rank: Rank, was_ready: bool) -> str:
    if rank.process is None:
        return f"rank {rank.index} has ended: its own output says why"
    rank.process.join(CAUSE_SECONDS)
    code = rank.process.exitcode
    if code is not None and code < 0:
        return f"rank {rank.index} was killed by signal {-code}"
    if was_ready:
        return f"rank {rank.index} has ended with exit status {code}"
    return (
        f"rank {rank.index} has ended with exit status {code} while it started: a script that makes an LLM with "
        "several ranks needs `if __name__ == '__main__':` around it, since every rank imports the script"
    )


def _end_ranks(owner: int, ranks: Sequence[Rank], selector: selectors.BaseSelector, store: list[Any]) -> None:
    """Kill what still runs, and close the connections, which ends ranks on other machines.

    owner: the process id of the engine; a fork of it ends nothing.
    """
    if os.getpid() != owner:
        return
    selector.close()
    for rank in ranks:
        if rank.process is not None:
            rank.process.kill()
    for rank in ranks:
        if rank.process is not None:
            rank.process.join()
        rank.channel.connection.close()
    store.clear()


def _processed(logits: Tensor, processors: LogitsProcessors) -> Processed:
    try:
        return Processed(process(logits, processors))
    except Exception as error:  # a caller's function may raise any type
        with suppress(Exception):
            pickle.loads(pickle.dumps(error))
            return Processed(None, error)
        return Processed(None, RuntimeError(str(error)))
