"""Which requests can be served at all, and when a waiting one may begin."""

from __future__ import annotations

from nanovllm.engine.block_manager import AllocStatus, BlockManager
from nanovllm.engine.limits import SchedulerLimits
from nanovllm.engine.request import Request
from nanovllm.errors import RequestError


def longest_sequence(request: Request, max_model_len: int) -> int:
    """Tokens that each of its sequences can reach, prompt included; the last one is never computed."""
    max_tokens = request.params.max_tokens
    return max_model_len if max_tokens is None else min(request.prompt_len + max_tokens, max_model_len)


def blocks_at_most(request: Request, limits: SchedulerLimits, block_size: int) -> int:
    """KV blocks that it can ever hold: the full ones of the prompt once, the rest for each of its sequences.

    A request of one sequence counts as one of max_model_len, which the engine has made sure of.
    """
    longest = max(longest_sequence(request, limits.max_model_len) - 1, request.prompt_len)
    shared, count = request.prompt_len // block_size, request.params.num_sequences
    if longest == request.prompt_len:  # one token each: they end as soon as the prompt is computed
        return -(-longest // block_size)
    return shared + count * (-(-longest // block_size) - shared)


def check_num_sequences(request_id: str, count: int, limits: SchedulerLimits) -> None:
    """Raise RequestError for more sequences than may run together; asked before a request of so many is built."""
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
    """Raise RequestError for a request that could never run, or that could not finish with the engine to itself.

    That is what makes preemption safe: whoever is alone can always go on.
    """
    check_num_sequences(request.request_id, request.params.num_sequences, limits)
    if manager.can_allocate(request.sequences[0]) is AllocStatus.NEVER:
        raise RequestError(
            f"request {request.request_id!r} has {request.prompt_len} tokens and needs "
            f"{request.sequences[0].num_blocks(manager.block_size)} KV blocks of {manager.block_size} tokens; the "
            f"cache has {manager.num_blocks} and keeps {manager.watermark} free: shorten the prompt to "
            f"{manager.max_sequence_tokens} tokens, or raise num_gpu_blocks or num_cpu_blocks"
        )
    if request.params.num_sequences > 1:
        _check_group_fits(request, limits, manager)


def blocks_beside(request: Request, block_size: int) -> int:
    """Blocks that a waiting request's sequences need beyond those that it is given first.

    None for a new one. For one that was preempted after its sequences parted: what each of them has generated.
    """
    if request.forked:
        return 0
    shared = request.prompt_len // block_size
    held = sum(-(-len(seq) // block_size) - shared for seq in request.live if seq.num_output_tokens)
    return max(0, held + shared - -(-request.prompt_len // block_size))


def _check_group_fits(request: Request, limits: SchedulerLimits, manager: BlockManager) -> None:
    needed, available = blocks_at_most(request, limits, manager.block_size), manager.num_blocks - manager.watermark
    if needed <= available:
        return
    count, shared = request.params.num_sequences, request.prompt_len // manager.block_size
    # One token more than fits, since the last is never computed.
    fitting = max(1, (shared + (available - shared) // count) * manager.block_size + 1 - request.prompt_len)
    raise RequestError(
        f"request {request.request_id!r} asks for {count} sequences of up to "
        f"{longest_sequence(request, limits.max_model_len)} tokens, which can need {needed} KV blocks of "
        f"{manager.block_size} tokens; the cache has {manager.num_blocks} and keeps {manager.watermark} free: lower "
        f"max_tokens to {fitting}, or n or best_of, or raise num_gpu_blocks or num_cpu_blocks"
    )
