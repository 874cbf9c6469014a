"""Requests of several sequences (n, best_of, beam search), and preemption by swapping."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import SchedulerLimits
from nanovllm.features.sequence_groups.requests import GroupRequest, check_num_sequences
from nanovllm.features.sequence_groups.swap import SwapPreemption
from nanovllm.sampling_params import SamplingParams

__all__ = ["SwapPreemption", "request_factory"]


def request_factory(
    request_id: str, params: SamplingParams, limits: SchedulerLimits, vocab_size: int
) -> Callable[..., Request]:
    """Makes a request of several sequences from `Request`'s arguments.

    Raises RequestError for more sequences than fit in one step.
    """
    check_num_sequences(request_id, params.num_sequences, limits)
    if not params.use_beam_search:
        return GroupRequest
    from nanovllm.features.sequence_groups.beams import BeamRequest

    return partial(BeamRequest, limits, vocab_size)
