"""Admission: which requests the engine can serve at all, and how many blocks they need."""

from __future__ import annotations

from nanovllm.engine.block_manager import AllocStatus, BlockManager
from nanovllm.engine.request import Request
from nanovllm.engine.scheduling_budget import SchedulerLimits
from nanovllm.errors import RequestError


def longest_sequence(request: Request, max_model_len: int) -> int:
    """Most tokens of each of its sequences, including the prompt."""
    max_tokens = request.params.max_tokens
    return max_model_len if max_tokens is None else min(request.prompt_len + max_tokens, max_model_len)


def blocks_at_most(request: Request, limits: SchedulerLimits, block_size: int) -> int:
    """Most KV blocks that the request can hold at once: full prompt blocks are shared, all others are per sequence."""
    # K/V of a sequence's last token is never computed.
    longest = max(longest_sequence(request, limits.max_model_len) - 1, request.prompt_len)
    shared, count = request.prompt_len // block_size, request.params.num_sequences
    if longest == request.prompt_len:  # one token each: the sequences end before they fork
        return -(-longest // block_size)
    return shared + count * (-(-longest // block_size) - shared)


def num_blocks_after_admission(request: Request, block_size: int) -> int:
    """Blocks that a waiting request's sequences need in addition to those allocated at admission.

    None for a new request. After a recompute, the blocks of what each sequence has generated.
    """
    if request.forked:
        return 0
    shared = request.prompt_len // block_size
    held = sum(-(-len(seq) // block_size) - shared for seq in request.live if seq.num_output_tokens)
    return max(0, held + shared - -(-request.prompt_len // block_size))


def check_num_sequences(request_id: str, count: int, limits: SchedulerLimits) -> None:
    """Raise RequestError for more sequences than fit in one step. Needs no Request, which would hold them all."""
    for name, limit in (
        ("max_num_seqs", limits.max_num_seqs),
        ("max_num_batched_tokens", limits.max_num_batched_tokens),
    ):
        if count > limit:
            raise RequestError(
                f"request {request_id!r} asks for {count} sequences, which run together, and {name} is {limit}: "
                f"lower n or best_of, or raise {name}"
            )


def check_servable(request: Request, limits: SchedulerLimits, manager: BlockManager) -> None:
    """Raise RequestError for a request that could not finish even if it had the KV cache to itself.

    Preemption relies on this check: the last running request can always grow.
    """
    check_num_sequences(request.request_id, request.params.num_sequences, limits)
    if manager.can_allocate(request.sequences[0]) is AllocStatus.NEVER:
        raise RequestError(
            f"request {request.request_id!r} has {request.prompt_len} tokens and needs "
            f"{request.sequences[0].num_blocks(manager.block_size)} KV blocks of {manager.block_size} tokens; the "
            f"cache has {manager.num_blocks} and keeps {manager.watermark} free: shorten the prompt to "
            f"{manager.max_sequence_tokens} tokens, or raise num_gpu_blocks or num_cpu_blocks"
        )
    # A single sequence of max_model_len always fits: the scheduler refuses a larger max_model_len.
    if request.params.num_sequences > 1:
        _check_group_fits(request, limits, manager)


def _check_group_fits(request: Request, limits: SchedulerLimits, manager: BlockManager) -> None:
    needed, available = blocks_at_most(request, limits, manager.block_size), manager.num_blocks - manager.watermark
    if needed <= available:
        return
    count, shared = request.params.num_sequences, request.prompt_len // manager.block_size
    # One token more than the blocks hold: K/V of the last token is never computed.
    fitting = max(1, (shared + (available - shared) // count) * manager.block_size + 1 - request.prompt_len)
    raise RequestError(
        f"request {request.request_id!r} asks for {count} sequences of up to "
        f"{longest_sequence(request, limits.max_model_len)} tokens, which can need {needed} KV blocks of "
        f"{manager.block_size} tokens; the cache has {manager.num_blocks} and keeps {manager.watermark} free: lower "
        f"max_tokens to {fitting}, or n or best_of, or raise num_gpu_blocks or num_cpu_blocks"
    )
