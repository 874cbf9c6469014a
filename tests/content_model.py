"""A plain-Python model of KV content, used as the executor of an engine.

The KV entry of a token depends on all tokens before it, so the model stores a digest of that history for each (physical
block, offset). The next token is a function of the digest and, where it is sampled, of seed and index. An error in a
block table, a block move or a cached prefix then shows in the first step that reads the entry. An entry has one digest
per layer: layer-by-layer prefill writes them one by one, and no other sequence may read or move an entry before it is
complete. A recurrent state is the digest of the tokens before it, in a state slot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from random import Random

from nanovllm.data.batch import (
    Batch,
    BlockMove,
    LayerwisePrefill,
    LayerwiseStep,
    Sample,
    SamplingRow,
    ScheduledSequence,
    StateMove,
    StepResult,
    TokenLogprobs,
)
from nanovllm.data.kv_groups import ANY_LENGTH, HOLE, KVGroups

VOCAB = 50


@lru_cache(1 << 16)
def history_digest(parent: bytes, token: int, salt: bytes) -> bytes:
    return hashlib.blake2b(parent + salt + token.to_bytes(4, "little"), digest_size=12).digest()


def sampled_token(digest: bytes, draw: tuple[int, int] | None = None) -> int:
    """The greedy token, or the token sampled with (seed, index)."""
    return digest[0] % VOCAB if draw is None else Random(f"{digest.hex()} {draw}").randrange(VOCAB)


@lru_cache(1 << 14)
def distribution(digest: bytes) -> tuple[list[int], list[float]]:
    """All tokens and their log-probabilities, the most likely first."""
    random = Random(digest)
    logprobs = sorted((-5.0 * random.random() for _ in range(VOCAB)), reverse=True)
    return random.sample(range(VOCAB), VOCAB), logprobs


def prompt_digest(prompt: Sequence[int], salt: bytes = b"") -> bytes:
    digest = b""
    for token in prompt:
        digest = history_digest(digest, token, salt)
    return digest


def expected_output(
    prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = (), salt: bytes = b"", seed: int | None = None
) -> list[int]:
    """The output of a sequence, whatever else is in the batch: greedy, or sampled with a seed."""
    digest = prompt_digest(prompt, salt)
    output = list[int]()
    while len(output) < max_tokens:
        output.append(sampled_token(digest, None if seed is None else (seed, len(output))))
        if output[-1] in stop:
            break
        digest = history_digest(digest, output[-1], salt)
    return output


def logprob_of(prompt: Sequence[int], output: Sequence[int], salt: bytes = b"") -> float:
    """Cumulative log-probability of an output."""
    digest = prompt_digest(prompt, salt)
    total = 0.0
    for token in output:
        tokens, logprobs = distribution(digest)
        total += logprobs[tokens.index(token)]
        digest = history_digest(digest, token, salt)
    return total


def expected_beams(
    prompt: Sequence[int],
    width: int,
    max_tokens: int,
    stop: Sequence[int] = (),
    salt: bytes = b"",
    penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[list[int]]:
    """A second beam search over complete histories, after the description of Transformers' search. Best first."""
    beams: list[tuple[float, list[int], bytes]] = [(0.0, [], prompt_digest(prompt, salt))]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, max_tokens + 1):
        following = [
            (total + logprob, [*output, token], history_digest(digest, token, salt))
            for total, output, digest in beams
            for token, logprob in zip(*distribution(digest), strict=True)
        ]
        following.sort(key=lambda beam: -beam[0])
        del following[max(2, 1 + len(set(stop))) * width :]
        ended = [length == max_tokens or output[-1] in stop for _, output, _ in following]
        new = [beam for beam, ends in zip(following[:width], ended, strict=False) if ends]
        finished += [(total / length**penalty, output) for total, output, _ in new]
        finished = sorted(finished, key=lambda beam: -beam[0])[:width]
        beams = [beam for beam, ends in zip(following, ended, strict=True) if not ends][:width]
        if not beams or (len(finished) == width and early_stopping is True):
            break
        hoped_length = max_tokens if early_stopping == "never" and penalty > 0 else length
        if len(finished) == width and beams[0][0] / hoped_length**penalty <= finished[-1][0]:
            break
    return [output for _, output in finished]


class ContentExecutor:
    """Runs batches on the model of KV content. Raises AssertionError at the first wrong entry."""

    def __init__(
        self,
        num_device_blocks: int,
        num_host_blocks: int,
        groups: KVGroups,
        num_swap_blocks: int = 0,
        num_device_states: int = 0,
    ) -> None:
        self.num_device_states = num_device_states
        self.states: dict[int, bytes | None] = {}  # by slot; None while some layers are further than others
        self.drafted: dict[int, list[bytes]] = {}  # of the latest pass with drafts: by slot the states it went through
        self.copied: dict[int, int] = {}  # by slot of a layer-by-layer prefill's snapshot: how many layers it has
        self.num_layerwise_snapshots = 0
        self.groups = groups
        self.num_layers = len(groups.of_layer)
        self.first_host = num_device_blocks
        self.first_swap = num_device_blocks + num_host_blocks
        self.num_physical_ids = self.first_swap + num_swap_blocks
        # (physical block id, offset) -> the digest of the history for each plane, None before the layer is computed
        self.entries: dict[tuple[int, int], list[bytes | None]] = {}
        self.group_of: dict[int, int] = {}  # of each physical block that has content
        self.layerwise: tuple[int, LayerwisePrefill, int] | None = None  # seq_id, part, its next (layer, chunk)
        self.buffered: dict[tuple[int, int], bytes] = {}  # (layer, position) -> digest, in the layer buffer alone
        self.num_layerwise = self.num_holes = self.num_buffered = 0
        self.histories: dict[int, Sequence[int]] = {}  # seq_id -> its tokens, set by the test
        self.salts: dict[int, bytes] = {}
        self.num_steps = 0
        self.num_moves = 0  # between the tiers
        self.num_copies = 0  # moves that keep their source
        self.num_part_moves = 0  # moves of a part of a block
        self.fail_next = False

    def advise(self, num_tokens: int) -> str:
        return "shorten the prompt or raise max_model_len"

    def check_health(self) -> None:
        pass

    def execute(self, batch: Batch) -> StepResult:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is on fire")
        self.num_steps += 1
        for move in batch.moves:
            self._move(move)
        self._check_written_blocks(batch)
        for state_move in batch.state_moves:
            self._move_state(state_move)
        slots = [seq.state_slot for seq in batch.sequences if seq.state_slot is not None]
        assert len(set(slots)) == len(slots) == (len(batch.sequences) if self.num_device_states else 0)
        self.drafted = {}  # replays come before the next pass
        if batch.layerwise is None:
            self.layerwise = None
        samples = [
            self._run_part(seq, seq.layerwise) if seq.layerwise else self._compute(seq) for seq in batch.sequences
        ]
        zeros = [0] * len(batch.sequences)
        return StepResult(samples, zeros, zeros)

    def close(self) -> None:
        return

    def _tier(self, physical_id: int) -> int:
        assert 0 <= physical_id < self.num_physical_ids
        return (physical_id >= self.first_host) + (physical_id >= self.first_swap)

    def _move(self, move: BlockMove) -> None:
        tiers = self._tier(move.src), self._tier(move.dst)
        assert move.src != move.dst
        self.num_moves += not move.keeps_source
        self.num_copies += move.keeps_source
        self.num_part_moves += move.num_tokens is not None
        group = self.group_of[move.dst] = self.group_of[move.src]
        block_size = self.groups[group].block_size
        assert move.num_tokens is None or move.group == group, "a part is copied from where the group has it"
        num_tokens = block_size if move.num_tokens is None else move.num_tokens
        assert 0 < num_tokens <= block_size
        moved = [self.entries.get((move.src, offset)) for offset in range(num_tokens)]
        assert moved[0] is not None and None not in moved[0], "a moved block has content in all layers"
        if not move.keeps_source:
            assert tiers[0] != tiers[1], "a move crosses the tiers"
            # Only the swap tier takes blocks that may still be written.
            complete = all(entry is not None and None not in entry for entry in moved)
            assert 2 in tiers or complete, "what is moved has content"
        for offset in range(max(group.block_size for group in self.groups)):  # what is not moved is undefined
            entry = moved[offset] if offset < num_tokens else None  # in the new block
            self.entries.pop((move.dst, offset), None)
            if entry is not None:
                self.entries[move.dst, offset] = list(entry)
            if not move.keeps_source:
                self.entries.pop((move.src, offset), None)

    def _own(self, physical_id: int, group: int) -> None:
        """A block that is written belongs to the group from now on: what it had of another is gone."""
        if self.group_of.get(physical_id, group) != group:
            for offset in range(max(group.block_size for group in self.groups)):
                self.entries.pop((physical_id, offset), None)
        self.group_of[physical_id] = group

    def _move_state(self, move: StateMove) -> None:
        assert move.src != move.dst
        if move.num_replayed:
            assert move.src is not None
            passed = self.drafted[move.src]
            assert self.states[move.dst] == passed[0], "a replay begins where the pass began"
            self.states[move.dst] = passed[move.num_replayed]
            return
        state = b"" if move.src is None else self.states[move.src]
        assert state is not None, "a moved state is that of one position in all layers"
        self.states[move.dst] = state

    def _check_state(self, seq: ScheduledSequence, digest: bytes) -> None:
        """The state before the new tokens is that of `digest`."""
        if seq.state_slot is not None:
            assert 0 <= seq.state_slot < self.num_device_states
            assert self.states[seq.state_slot] == digest, f"wrong state at position {seq.context_len} of {seq.seq_id}"

    def _check_written_blocks(self, batch: Batch) -> None:
        """No physical block is written by one sequence and used by another in the same step."""
        users: dict[int, int] = {}
        for seq in batch.sequences:
            for physical_id in chain.from_iterable(seq.block_tables):
                users[physical_id] = users.get(physical_id, 0) + 1
        for seq in batch.sequences:
            for table, group in zip(seq.block_tables, self.groups, strict=True):
                for physical_id in set(table[seq.context_len // group.block_size :]) - {HOLE}:
                    assert users[physical_id] == 1, f"block {physical_id} is written while another sequence uses it"

    def _check_tables(self, seq: ScheduledSequence, total: int) -> None:
        """A sequence holds what it sees and writes, once each, and nothing that lies behind a window."""
        held = [block for table in seq.block_tables for block in table if block != HOLE]
        assert len(seq.block_tables) == len(self.groups) and len(set(held)) == len(held)
        assert max(held) < self.first_swap, "swapped blocks are not attended"
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            first = group.first_visible(seq.context_len)
            assert len(table) == group.num_blocks(total)
            assert table[:first] == [HOLE] * first, "released"
            needed = table[first : group.num_blocks(seq.context_len)]
            needed += table[max(first, group.first_visible(total)) :] if seq.layerwise else table[first:]
            assert HOLE not in needed, "a hole is seen or written"
            self.num_holes += first

    def _compute(self, seq: ScheduledSequence) -> list[Sample]:
        assert len(seq.token_ids) > 0, "zero-length query"
        total = seq.context_len + len(seq.token_ids)
        self._check_tables(seq, total)
        known = self.histories[seq.seq_id][: total - seq.num_drafts]
        salt = self.salts[seq.seq_id]
        tokens = [*known, *seq.drafts]
        assert list(seq.token_ids) == tokens[seq.context_len :]
        digest = b""
        digests = list[bytes]()
        for position in range(total):
            if position == seq.context_len:
                self._check_state(seq, digest)
            digest = history_digest(digest, tokens[position], salt)
            digests.append(digest)
            for index, table in enumerate(seq.block_tables):
                group = self.groups[index]
                where = (table[position // group.block_size], position % group.block_size)
                if position >= seq.context_len:
                    self._own(where[0], index)
                    self.entries[where] = [digest] * len(group.layers)
                elif position > seq.context_len - (group.window or ANY_LENGTH):
                    entry = self.entries.get(where)
                    assert self.group_of[where[0]] == index
                    assert entry == [digest] * len(group.layers), f"wrong KV at position {position} of {seq.seq_id}"
        if seq.state_slot is not None:
            self.states[seq.state_slot] = digest
            if seq.num_drafts:
                self.drafted[seq.state_slot] = [b"", *digests][seq.context_len :]
        if not seq.num_drafts:
            return [self._sample(digest, row) for row in seq.samples]
        samples = [self._sample(*each) for each in zip(digests[-1 - seq.num_drafts :], seq.samples, strict=True)]
        right = [sample.token_id == draft for sample, draft in zip(samples, seq.drafts, strict=False)]
        return samples[: [*right, False].index(False) + 1]

    def _run_part(self, seq: ScheduledSequence, part: LayerwiseStep) -> list[Sample]:
        """Part of a layer-by-layer prefill: each chunk reads its layer up to its own end, and writes its own part."""
        layerwise = part.layerwise
        if part.first_layer_chunk == 0:
            self.layerwise = (seq.seq_id, layerwise, 0)
            self.buffered = {}
            self.num_layerwise += 1
        assert self.layerwise == (seq.seq_id, layerwise, part.first_layer_chunk), (
            "the hidden states are those of another layer or chunk"
        )
        assert seq.context_len == layerwise.begin and layerwise.begin + len(seq.token_ids) == layerwise.end
        self._check_tables(seq, layerwise.end)
        tokens = self.histories[seq.seq_id][: layerwise.end]
        digests = [b""]
        assert list(seq.token_ids) == list(tokens[layerwise.begin :])
        for token in tokens:
            digests.append(history_digest(digests[-1], token, self.salts[seq.seq_id]))
        if part.first_layer_chunk == 0:
            self._check_state(seq, digests[layerwise.begin])
        for layer_chunk in range(part.first_layer_chunk, part.end_layer_chunk):
            layer = layerwise.layer(layer_chunk)
            table = seq.block_tables[self.groups.of_layer[layer][0]]
            chunk = layerwise.positions(layer_chunk)
            self._run_layer_chunk(layer, chunk, table, digests[1:])
            for slot in (slot for position, slot in layerwise.snapshots if position == chunk.stop):
                self._copy_layer(layer, slot, digests[chunk.stop])
        self.layerwise = (seq.seq_id, layerwise, part.end_layer_chunk)
        is_last = part.end_layer_chunk == self.num_layers * layerwise.num_chunks
        if seq.state_slot is not None:
            self.states[seq.state_slot] = digests[-1] if is_last else None
        assert is_last or not seq.samples, "a token is sampled when all layers are done"
        return [self._sample(digests[-1], row) for row in seq.samples]

    def _copy_layer(self, layer: int, slot: int, digest: bytes) -> None:
        """A layer of a snapshot, which has the layers before it."""
        assert slot >= self.num_device_states
        assert layer == 0 or (self.copied[slot] == layer and self.states[slot] is None)
        self.copied[slot], self.states[slot] = layer + 1, None
        if layer == self.num_layers - 1:
            self.states[slot] = digest
            self.num_layerwise_snapshots += 1

    def _run_layer_chunk(self, layer: int, chunk: range, block_table: Sequence[int], digests: Sequence[bytes]) -> None:
        assert layer < self.num_layers and len(chunk) > 0
        index, plane = self.groups.of_layer[layer]
        group = self.groups[index]
        for position in range(max(0, chunk.start + 1 - (group.window or ANY_LENGTH)), chunk.stop):
            where = (block_table[position // group.block_size], position % group.block_size)
            if where[0] == HOLE:
                if position in chunk:
                    self.buffered[layer, position] = digests[position]
                    self.num_buffered += 1
                digest: bytes | None = self.buffered[layer, position]
            else:
                if position in chunk and plane == 0:
                    self._own(where[0], index)
                    self.entries[where] = [None] * len(group.layers)
                entry = self.entries[where]
                if position in chunk:
                    entry[plane] = digests[position]
                digest = entry[plane]
            assert digest == digests[position], f"wrong KV at position {position} in layer {layer}"

    def _sample(self, digest: bytes, row: SamplingRow) -> Sample:
        token = sampled_token(digest, None if row.temperature == 0 else (row.seed, row.index))
        if row.num_logprobs is None:
            return Sample(token)
        tokens, logprobs = distribution(digest)
        rank = tokens.index(token)
        count = row.num_logprobs
        return Sample(token, TokenLogprobs(logprobs[rank], rank + 1, tokens[:count], logprobs[:count]))
