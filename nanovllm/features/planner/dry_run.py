"""The steps of one prompt alone, from the engine's own scheduler and block manager, and what each of them copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from nanovllm.data.batch import BlockMove, LayerwisePrefill, Sample, ScheduledSequence, StepResult
from nanovllm.data.kv_groups import HOLE, KVGroup
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.layerwise_scheduler import LayerwiseScheduler
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.scheduling_budget import SchedulerLimits
from nanovllm.features.recurrent.snapshots import recurrent_edge
from nanovllm.features.recurrent.states import RecurrentStates
from nanovllm.memory.budget import TransferCount, blocks_of_share
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.layerwise import NO_LAYERWISE
from nanovllm.memory.layout import KVLayout
from nanovllm.memory.sizing import KVPlan
from nanovllm.sampling_params import SamplingParams

NOTHING_MOVED = TransferCount()
Share = Callable[[int, int, int], float]  # see `StepModel.share_of`


def dry_run(sizing: KVSizing, kv: KVPlan, prompt_len: int, output_len: int) -> Iterator[ScheduledStep]:
    """The steps of a request alone in the engine, with nothing cached, and without a `kv_cache_dir`."""
    config = sizing.config
    groups = sizing.layout.groups
    states = sizing.memory.states
    limits = SchedulerLimits(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        kv.max_model_len,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        num_layers=sizing.layout.num_layers,
        layerwise_memory=kv.layerwise_memory,
        edge=1 if states is None else recurrent_edge(config, states.running),
    )
    tiers = kv.split.resident_blocks, kv.num_cpu_blocks
    manager = BlockManager(*tiers, groups, config.enable_prefix_caching, chunk=limits.chunk)
    recurrent = None if states is None else RecurrentStates(manager, states.device, states.host)
    if limits.layerwise_memory != NO_LAYERWISE:
        manager.hooks.append(LayerwiseScheduler(manager, limits, recurrent))
    manager.hooks += [] if recurrent is None else [recurrent]
    scheduler = Scheduler(limits, manager)
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    scheduler.add(Request("plan", [0] * prompt_len, params, number=0, seq_ids=count(), seed=0, arrival_time=0.0))
    while scheduler.has_unfinished():
        batch = scheduler.schedule(0.0)
        (seq,) = batch.sequences
        of_states = NOTHING_MOVED if states is None else states.transfers(batch.state_moves)
        if states is not None and seq.layerwise is not None and seq.layerwise.first_layer_chunk == 0:
            kept = len(seq.layerwise.layerwise.snapshots)
            of_states += TransferCount(d2h_copies=kept, d2h_bytes=kept * states.slot_bytes)
        yield ScheduledStep(seq, batch.moves, of_states, manager.pool.num_used)
        scheduler.update(batch, StepResult([[Sample(0)] * len(seq.samples)], [0], [0]), 0.0)


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step of one sequence."""

    seq: ScheduledSequence
    moves: Sequence[BlockMove]
    of_states: TransferCount = NOTHING_MOVED  # copies of recurrent states
    used_blocks: int = 0  # that the sequence has in this step

    @property
    def query_len(self) -> int:
        return len(self.seq.token_ids)

    @property
    def work(self) -> LayerwisePrefill:
        """The tokens that the step computes, or the whole layer-by-layer prefill that it has a part of."""
        if self.seq.layerwise is not None:
            return self.seq.layerwise.layerwise
        begin = self.seq.context_len
        return LayerwisePrefill(begin, begin + self.query_len, self.query_len)

    def again(self) -> ScheduledStep:
        """The step as if it computed its last token alone."""
        end = self.seq.context_len + self.query_len
        return ScheduledStep(replace(self.seq, context_len=end - 1, token_ids=[0], layerwise=None), ())

    def seen(self, layout: KVLayout, resident_blocks: int) -> tuple[int, int]:
        """Bytes of K and V that its layers see, and how much of them is on the device."""
        total = 0
        on_device = 0
        for index, group in enumerate(layout.groups):
            for read in self._reads(group, self.seq.block_tables[index], resident_blocks):
                num_bytes = layout.of_groups[index].token_bytes * read.num_blocks * (read.stored + read.new)
                total += num_bytes
                on_device += 0 if read.on_host else num_bytes
        return total, on_device

    def moved(self, layout: KVLayout, resident_blocks: int, share: Share | None) -> TransferCount:
        """What the step copies and leaves to the CPU. A layer-by-layer prefill counts as a whole in its first step.

        share: how much of its host blocks a layer leaves to the CPU; None for nothing.
        """
        moved = self._block_moves(layout, resident_blocks) + self.of_states
        part = self.seq.layerwise
        if part is not None and part.first_layer_chunk > 0:
            return moved
        for index, group in enumerate(layout.groups):
            reads = self._reads(group, self.seq.block_tables[index], resident_blocks)
            moved += _of_layers(layout.of_groups[index], reads, share)
        return moved

    def _reads(self, group: KVGroup, table: Sequence[int], resident_blocks: int) -> list[BlockReads]:
        """The blocks that a layer of the group uses, but those in the layer buffer alone."""
        begin = self.seq.context_len
        end = self.seq.context_len + self.query_len
        size = group.block_size
        first = group.first_visible(begin)
        full = begin // size
        last = group.num_blocks(end)
        whole = [block for block in table[first:full] if block != HOLE]
        on_host = sum(block >= resident_blocks for block in whole)
        reads = [BlockReads(on_host, size, 0, True), BlockReads(len(whole) - on_host, size, 0, False)]
        for index in range(max(first, full), last):
            if table[index] != HOLE:
                stored = max(0, begin - index * size)
                new = min(size, end - index * size) - stored
                reads.append(BlockReads(1, stored, new, table[index] >= resident_blocks))
        return reads

    def _block_moves(self, layout: KVLayout, resident_blocks: int) -> TransferCount:
        total = TransferCount()
        for move in self.moves:
            of_group = layout.of_groups[move.group]
            num_bytes = layout.planes * of_group.token_layer_bytes * (move.num_tokens or of_group.block_size)
            to_host = move.dst >= resident_blocks
            from_host = move.src >= resident_blocks
            if from_host and not to_host:
                total += TransferCount(h2d_copies=1, h2d_bytes=num_bytes)
            elif to_host and not from_host:
                total += TransferCount(d2h_copies=1, d2h_bytes=num_bytes)
        return total


class BlockReads(NamedTuple):
    """Blocks that a layer uses alike: stored and new tokens in each of them."""

    num_blocks: int
    stored: int
    new: int
    on_host: bool


def _of_layers(layout: KVLayout, reads: Sequence[BlockReads], share: Share | None) -> TransferCount:
    """What the layers of a KV group copy for these reads, and those that read their K and V.

    layout: of `KVLayout.of_groups`. A layer without K and V of its own loads, and stores nothing.
    """
    token = layout.token_layer_bytes
    size = layout.block_size
    on_host = [read for read in reads if read.on_host]
    loaded = sum(read.num_blocks * read.stored for read in on_host)
    spared = 0
    if share is not None:
        whole = sum(read.num_blocks for read in on_host if read.stored == size)
        resident = sum(read.num_blocks * read.stored for read in reads if not read.on_host)
        spared = blocks_of_share(whole, share(loaded * token, resident * token, size * token))
    layers = layout.num_layers
    readers = layout.num_readers
    return TransferCount(
        h2d_copies=readers * (sum(read.num_blocks for read in on_host if read.stored) - spared),
        h2d_bytes=readers * (loaded - spared * size) * token,
        d2h_copies=layers * sum(read.num_blocks for read in on_host if read.new),
        d2h_bytes=layers * sum(read.num_blocks * read.new for read in on_host) * token,
        cpu_attention_blocks=readers * spared,
        cpu_attention_bytes=readers * spared * size * token,
    )
