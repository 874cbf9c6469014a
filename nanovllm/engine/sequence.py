"""One request's sequence of tokens and everything the engine knows about it."""

from __future__ import annotations

from enum import Enum

from nanovllm.kvcache.prefill_plan import PrefillSpan
from nanovllm.outputs import RequestMetrics
from nanovllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Prompt and generated tokens, how many of them are in the KV cache, and the blocks that hold them.

    `[0, num_computed)` is in the cache. The last token is never computed before it is needed: sampling from it is
    what computing it is for.
    """

    def __init__(
        self,
        seq_id: int,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        arrival_time: float,
        priority: int = 0,
        prompt: str | None = None,
        cache_salt: bytes = b"",
    ) -> None:
        self.seq_id = seq_id
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.token_ids = list(prompt_token_ids)
        self.params = params
        self.seed = seed
        self.priority = priority
        self.cache_salt = cache_salt
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | None = None
        self.num_computed = 0
        self.block_table: list[int] = []
        self.span: PrefillSpan | None = None  # of its tokens, those to prefill layer by layer
        self.span_units = 0  # of these, units that are done; no token counts as computed before all are
        self.block_hashes: list[bytes] = []  # of its full blocks, as far as they were asked for
        self.metrics = RequestMetrics(arrival_time=arrival_time)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens still to compute before the next one can be sampled; at least 1 while it runs."""
        return len(self.token_ids) - self.num_computed

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key of the scheduler: priority (lower first), then arrival."""
        return (self.priority, self.metrics.arrival_time, self.seq_id)

    def num_blocks(self, block_size: int) -> int:
        """Blocks that hold all its tokens."""
        return -(-len(self.token_ids) // block_size)
