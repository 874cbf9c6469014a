"""The step after a step of greedy tokens, which begins on the device before the host has read these tokens.

The host knows all of the next step but its token ids, if the same sequences go on and none needs another block: it
fills the tables of the next step, and the device copies the token ids. Whether that is the step that the scheduler asks
for next is seen when it asks; if not, what was computed is dropped.

What a dropped step has written is one token of K/V for each of its sequences, in the block that the sequence wrote last
and owned alone, behind its last known token. Nothing sees it: attention and copies of parts end at the known tokens;
the prefix cache and the store of blocks take blocks, or parts of them, of known tokens alone; and whoever has the block
next writes it on the same stream, or after a wait for all that this stream has been given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanovllm.data.kv_groups import KVGroups
from nanovllm.kvcache.forward_pass import FlatBatch
from nanovllm.ops.attention import SequenceMetadata


@dataclass(frozen=True, slots=True)
class NextStep:
    """The step after another one: the same sequences, each with one more token."""

    inputs: Tensor  # as `FlatBatch.inputs`, with zeros for the token ids
    sequences: tuple[SequenceMetadata, ...]
    # By the next step another request may have the same blocks, positions and token, but other K/V in the blocks.
    seq_ids: tuple[int, ...]

    @classmethod
    def after(cls, batch: FlatBatch, groups: KVGroups) -> NextStep | None:
        """The step after a batch; None if it cannot be known: a sequence needs another block, or has other rows."""
        if any(seq.query_len != 1 or _begins_block(seq, groups) for seq in batch.sequences):
            return None
        if any(seq.adapter is not None for seq in batch.scheduled):
            return None
        sequences = (replace(seq, context_len=seq.context_len + 1, kv_end=seq.kv_end + 1) for seq in batch.sequences)
        _, positions = batch.inputs
        inputs = torch.stack((torch.zeros_like(positions), positions + 1))
        return cls(inputs, tuple(sequences), _ids(batch))

    def is_step(self, batch: FlatBatch, token_ids: Sequence[int]) -> bool:
        """Whether a batch is this step with these token ids."""
        if self.seq_ids != _ids(batch) or self.sequences != batch.sequences:
            return False
        if any(seq.adapter is not None for seq in batch.scheduled):
            return False
        return torch.equal(self.inputs[1], batch.inputs[1]) and batch.inputs[0].tolist() == list(token_ids)


def _ids(batch: FlatBatch) -> tuple[int, ...]:
    return tuple(seq.seq_id for seq in batch.scheduled)


def _begins_block(seq: SequenceMetadata, groups: KVGroups) -> bool:
    """Whether the token after the sequence's begins a block of some KV group."""
    return any(seq.total_len % group.block_size == 0 for group in groups)
