"""What the engine and its ranks send each other, over a pipe or a socket: plain pickles, and no tensors shared."""

from __future__ import annotations

import logging
import pickle
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from nanovllm.data.batch import Batch, StepResult
from nanovllm.device import Busy
from nanovllm.errors import ConfigError, EngineError, ModelError, RefusedError, told
from nanovllm.kvcache.base import KVStats
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.sizing import KVPlan
from nanovllm.models.spec import DecoderSpec


class CollectiveError(EngineError):
    """The ranks could not communicate, most likely because another one has failed."""


# ---- from the engine


@dataclass(frozen=True, slots=True)
class Execute:
    """Run a step. Steps are counted, since only the first rank's end of a step is awaited."""

    step: int
    batch: Batch
    watched: bool  # the first rank reports the progress of the step


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The values of all ranks, in order."""

    values: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Processed:
    """What the caller's logits processors made of a row's logits, or their error."""

    logits: Tensor | None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Close:
    """End the rank."""


# ---- from a rank


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """The value of this rank; the answer is `Exchanged`."""

    value: Any


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded. The facts are those of the rank."""

    spec: DecoderSpec
    dtype: torch.dtype
    sizing: KVSizing
    plan: KVPlan
    num_swap_blocks: int
    stats: KVStats


@dataclass(frozen=True, slots=True)
class Done:
    """The rank has finished a step. Only the first rank has a result."""

    step: int
    result: StepResult | None = None
    stats: KVStats | None = None
    busy: Busy | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """The share of the step in progress that is done."""

    share: float
    stats: KVStats


@dataclass(frozen=True, slots=True)
class Process:
    """Logits [vocab] for the processors of `batch.sequences[sequence].samples[sample]`; the answer is `Processed`."""

    sequence: int
    sample: int
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Log:
    """A log record of the rank."""

    record: logging.LogRecord


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that ended a rank."""

    rank: int
    kind: type[Exception]  # one of the engine's own
    message: str
    changes: Sequence[Any]
    traceback: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        own = next((kind for kind in (CollectiveError, ConfigError, ModelError) if isinstance(error, kind)), None)
        text = "".join(traceback.format_exception(error))
        changes = error.changes if isinstance(error, RefusedError) else ()
        return cls(rank, own or EngineError, str(error) if own else told(error), changes, text)


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
