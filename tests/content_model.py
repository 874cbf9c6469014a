"""A plain-Python model of KV content: each place remembers the token history that its entries stand for.

It plays the executor of an engine. The KV entry of a token depends on all tokens before it, so an entry is modelled as
the digest of that history; the next token is a function of the digest. Whatever is wrong with a block table, a block
move or a cached prefix then shows in the step that reads it. An entry has a digest for each layer: a span writes them
layer by layer, and nobody else may read or move a token before it has them all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from nanovllm.engine.batch import Batch, Sample, ScheduledSequence, StepResult
from nanovllm.kvcache.prefill_plan import PrefillSpan, SpanSlice

VOCAB = 50


def history_digest(parent: bytes, token: int, salt: bytes) -> bytes:
    return hashlib.blake2b(parent + salt + token.to_bytes(4, "little"), digest_size=12).digest()


def sampled_token(digest: bytes) -> int:
    return digest[0] % VOCAB


def expected_output(prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = (), salt: bytes = b"") -> list[int]:
    """What a request generates, whatever happens around it."""
    digest = b""
    for token in prompt:
        digest = history_digest(digest, token, salt)
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(sampled_token(digest))
        if output[-1] in stop:
            break
        digest = history_digest(digest, output[-1], salt)
    return output


class ContentExecutor:
    """Runs batches on the model of KV content; raises AssertionError at the first entry that is wrong."""

    def __init__(self, num_device_blocks: int, num_host_blocks: int, block_size: int, num_layers: int = 1) -> None:
        self.block_size = block_size
        self.num_layers = num_layers
        self.num_device_blocks = num_device_blocks
        self.num_places = num_device_blocks + num_host_blocks
        # (place, offset) -> in each layer the digest of the history up to there, None before the layer is computed
        self.entries: dict[tuple[int, int], list[bytes | None]] = {}
        self.span: tuple[int, PrefillSpan, int] | None = None  # whose it is, and the unit that comes next
        self.num_spans = 0
        self.histories: dict[int, Sequence[int]] = {}  # seq_id -> its tokens, told by the test
        self.salts: dict[int, bytes] = {}
        self.num_steps = 0
        self.num_moves = 0
        self.fail_next = False

    def execute(self, batch: Batch) -> StepResult:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is on fire")
        self.num_steps += 1
        for move in batch.moves:
            self._move(move.src, move.dst)
        self._check_written_places(batch)
        if batch.span is None:
            self.span = None
        samples = [self._run_slice(seq, seq.span) if seq.span else self._compute(seq) for seq in batch.sequences]
        zeros = [0] * len(batch.sequences)
        return StepResult(samples, zeros, zeros)

    def close(self) -> None:
        return

    def _move(self, src: int, dst: int) -> None:
        assert (src < self.num_device_blocks) != (dst < self.num_device_blocks), "a move crosses the tiers"
        assert max(src, dst) < self.num_places
        self.num_moves += 1
        for offset in range(self.block_size):
            moved = self.entries.pop((src, offset), None)
            assert moved is not None and None not in moved, "a moved block is full"
            self.entries[dst, offset] = moved

    def _check_written_places(self, batch: Batch) -> None:
        """No place is written by one sequence and used by another in the same step."""
        users: dict[int, int] = {}
        for seq in batch.sequences:
            for place in seq.block_table:
                users[place] = users.get(place, 0) + 1
        for seq in batch.sequences:
            for place in seq.block_table[seq.context_len // self.block_size :]:
                assert users[place] == 1, f"place {place} is written while another sequence uses it"

    def _compute(self, seq: ScheduledSequence) -> list[Sample]:
        assert len(seq.token_ids) > 0, "zero-length query"
        total = seq.context_len + len(seq.token_ids)
        assert len(seq.block_table) == -(-total // self.block_size)
        assert len(set(seq.block_table)) == len(seq.block_table)
        tokens, salt = self.histories[seq.seq_id], self.salts[seq.seq_id]
        assert list(seq.token_ids) == list(tokens[seq.context_len : total])
        digest = b""
        for position in range(total):
            digest = history_digest(digest, tokens[position], salt)
            where = (seq.block_table[position // self.block_size], position % self.block_size)
            if position < seq.context_len:
                entry = self.entries.get(where)
                assert entry == [digest] * self.num_layers, f"wrong KV at position {position} of {seq.seq_id}"
            else:
                self.entries[where] = [digest] * self.num_layers
        return [Sample(sampled_token(digest)) for _ in seq.samples]

    def _run_slice(self, seq: ScheduledSequence, part: SpanSlice) -> list[Sample]:
        """A few units of a span: each reads its own layer up to its chunk, and writes it there."""
        span = part.span
        if part.first_unit == 0:
            self.span = (seq.seq_id, span, 0)
            self.num_spans += 1
        assert self.span == (seq.seq_id, span, part.first_unit), "the hidden states are those of another unit"
        assert seq.context_len == span.begin and span.begin + len(seq.token_ids) == span.end
        assert len(seq.block_table) == len(set(seq.block_table)) == -(-span.end // self.block_size)
        tokens, digests = self.histories[seq.seq_id][: span.end], [b""]
        assert list(seq.token_ids) == list(tokens[span.begin :])
        for token in tokens:
            digests.append(history_digest(digests[-1], token, self.salts[seq.seq_id]))
        for unit in range(part.first_unit, part.end_unit):
            self._run_unit(span.layer(unit), span.positions(unit), seq.block_table, digests[1:])
        self.span = (seq.seq_id, span, part.end_unit)
        is_last = part.end_unit == self.num_layers * span.num_chunks
        assert is_last or not seq.samples, "a token is sampled when all layers are done"
        return [Sample(sampled_token(digests[-1])) for _ in seq.samples]

    def _run_unit(self, layer: int, chunk: range, block_table: Sequence[int], digests: Sequence[bytes]) -> None:
        assert layer < self.num_layers and len(chunk) > 0
        for position in range(chunk.stop):
            where = (block_table[position // self.block_size], position % self.block_size)
            if position in chunk and layer == 0:
                self.entries[where] = [None] * self.num_layers
            entry = self.entries[where]
            if position in chunk:
                entry[layer] = digests[position]
            assert entry[layer] == digests[position], f"wrong KV at position {position} in layer {layer}"
