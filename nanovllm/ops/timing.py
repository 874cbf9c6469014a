"""Timing of calls and of attention, for rates that are measured on the machine at hand."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from nanovllm.ops.attention import AttentionBackend, AttentionMetadata, AttentionState


def call_seconds(
    work: Callable[[], object], rounds: int, finish: Callable[[], object] = lambda: None, most_seconds: float = math.inf
) -> list[float]:
    """Seconds of each of `rounds` calls of `work` and `finish`, after a first call that does not count.

    finish: waits for what `work` launched. most_seconds: no further call begins once the calls took that long in total.
    """
    times: list[float] = []
    work()
    finish()
    while len(times) < rounds and sum(times) < most_seconds:
        start = time.perf_counter()
        work()
        finish()
        times.append(time.perf_counter() - start)
    return times


def attend_once(backend: AttentionBackend, q: Tensor, pool: Tensor, groups: Sequence[AttentionMetadata]) -> None:
    """Attention of q [tokens, heads, head_dim] to groups of blocks of a pool, with a result that is dropped."""
    state = AttentionState.empty(q)
    for group in groups:
        backend.attend(q, pool, group, state, q.shape[-1] ** -0.5, None)
