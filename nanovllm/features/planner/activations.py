"""The memory of the largest step from shapes alone, equal to what the engine counts on meta tensors. No torch.

Each function follows the code that it is named after: sizes are held as long as that code holds the tensors. Tensors
that are never the most are left out: those of RoPE's angles are less than attention's, those of the router less than
the experts'.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nanovllm.data.expert_spec import ExpertSpec
from nanovllm.layers.row_limits import DEVICE_CHUNK_ROWS, DEVICE_PIECE, LOGPROB_ROWS
from nanovllm.models.spec import WIDE_NORM_BYTES, DecoderSpec

BOOL, FP32, INT64, FP64 = 1, 4, 8, 8  # bytes


def activation_peak(spec: DecoderSpec, itemsize: int, tokens: int, num_seqs: int, max_logprobs: int) -> int:
    """Bytes that a step of `tokens` tokens holds at its peak on a GPU, sampling for `num_seqs` sequences.

    See `memory.profiling.activation_peak`. spec: without quantization; of tensor-parallel ranks, one's part, taken for
    the rank that samples. itemsize: of its dtype.
    """
    assert spec.quantization is None
    step = _Step(spec.one_of_each_kind(), itemsize)
    step.largest_step(tokens, min(num_seqs, tokens), max_logprobs)
    return step.peak


class _Step:
    """The bytes that are held, and the most that ever were."""

    def __init__(self, spec: DecoderSpec, itemsize: int) -> None:
        self.spec = spec
        self.itemsize = itemsize
        self.norm_itemsize = WIDE_NORM_BYTES if spec.zero_centered_norms else itemsize
        self.is_fp32 = itemsize == FP32
        self.num_ranks = 1 if spec.sharding is None else spec.sharding.num_ranks
        self.live = self.peak = 0

    def take(self, *sizes: int) -> int:
        """Hold further tensors. Returns their bytes."""
        self.live += sum(sizes)
        self.peak = max(self.peak, self.live)
        return sum(sizes)

    def free(self, *sizes: int) -> None:
        self.live -= sum(sizes)

    @contextmanager
    def scope(self, *sizes: int) -> Iterator[None]:
        """Hold tensors for a block, at whose end all that is taken in it is freed."""
        live = self.live
        self.take(*sizes)
        yield
        self.live = live

    def largest_step(self, tokens: int, rows: int, max_logprobs: int) -> None:
        vocab, scored = self.spec.vocab_size, min(rows, LOGPROB_ROWS)
        self.take(INT64 * tokens)
        self.embed(tokens)
        with self.scope():
            self.layers(tokens)
        with self.scope():
            self.compute_logits(min(tokens, LOGPROB_ROWS))
            self.score(min(tokens, LOGPROB_ROWS), max_logprobs)
        self.compute_logits(rows)
        with self.scope(FP32 * scored * vocab):  # a copy
            self.score(scored, max_logprobs)
        self.draw(min(rows, max(1, DEVICE_PIECE // vocab)), vocab)

    # ---- the network

    def embed(self, tokens: int) -> int:
        x = self.itemsize * tokens * self.spec.hidden_size
        if self.num_ranks == 1:
            return self.take(x)
        elsewhere, masked = BOOL * tokens, INT64 * tokens
        self.take(elsewhere, masked, x)
        self.free(masked)
        result = self.all_reduce(tokens * self.spec.hidden_size)
        self.free(elsewhere, x)
        return result

    def all_reduce(self, size: int) -> int:
        """The sum of `size` elements. In fp32 it is a view of what was received."""
        received = self.take(self.num_ranks * size * self.itemsize)
        if self.is_fp32:
            return received
        wide = self.take(FP32 * size)
        self.free(received)
        result = self.take(self.itemsize * size)
        self.free(wide)
        return result

    def layers(self, tokens: int) -> None:
        spec = self.spec
        self.take(len(spec.ropes) * FP32 * tokens * spec.head_dim * 3 // 2)  # cos and half as many of sin
        self.take(self.itemsize * tokens * (spec.q_size + 2 * spec.kv_size))
        rows = min(tokens, DEVICE_CHUNK_ROWS)
        for index in range(spec.num_layers):
            with self.scope():
                self.project(rows)
            with self.scope(FP32 * tokens * (spec.q_size + spec.num_heads)):  # attention: output and LSE
                pass
            with self.scope():
                self.finish(index, rows)
        self.rms_norm(rows, spec.hidden_size)

    def rms_norm(self, rows: int, columns: int) -> int:
        size = rows * columns
        wide = self.take(0 if self.is_fp32 else FP32 * size)
        mean, scaled = self.take(FP32 * rows), self.take(FP32 * size)
        self.free(mean)
        as_weight = self.take(0 if self.norm_itemsize == FP32 else self.norm_itemsize * size)
        result = self.take(0 if self.norm_itemsize == self.itemsize else self.itemsize * size)
        self.free(wide, scaled, as_weight, result)
        return self.take(self.itemsize * size)

    def project(self, rows: int) -> None:
        spec = self.spec
        self.rms_norm(rows, spec.hidden_size)
        self.take(self.itemsize * rows * (spec.q_size + 2 * spec.kv_size))
        rotated = rows * (spec.num_heads + spec.num_kv_heads)  # heads of q and k
        if spec.qk_norm:
            self.rms_norm(rotated, spec.head_dim)
        wide = FP32 * rotated * spec.head_dim
        self.take(wide, 0 if self.is_fp32 else wide)

    def finish(self, index: int, rows: int) -> None:
        hidden = self.spec.hidden_size
        result = self.take(self.itemsize * rows * hidden)
        self.added(result, rows)
        self.rms_norm(rows, hidden)
        self.added(self.mlp(index, rows), rows)

    def added(self, x: int, rows: int) -> int:
        """What is added to the residual stream of the `x` bytes of a product: summed over the ranks and normalized."""
        hidden = self.spec.hidden_size
        if self.num_ranks > 1:
            summed = self.all_reduce(rows * hidden)
            self.free(x)
            x = summed
        if self.spec.output_norms:
            normed = self.rms_norm(rows, hidden)
            self.free(x)
            x = normed
        return x

    def mlp(self, index: int, rows: int) -> int:
        experts = self.spec.experts
        if experts is not None and experts.layers[index]:
            return self.experts(experts, rows)
        inner = self.itemsize * rows * self.spec.intermediate_size
        x = self.itemsize * rows * self.spec.hidden_size
        with self.scope(inner, max(2 * inner, x)):
            pass
        return self.take(x)

    def experts(self, spec: ExpertSpec, rows: int) -> int:
        """All rows choose the same experts, which takes the most. Of the last expert some tensors are held for long."""
        hidden = rows * self.spec.hidden_size
        x, wide, inner = self.itemsize * hidden, FP32 * hidden, self.itemsize * rows * spec.intermediate_size
        entries, several = INT64 * rows + FP32 * rows, spec.num_experts_per_tok > 1
        weights, chosen = FP32 * rows * spec.num_experts_per_tok, INT64 * rows * spec.num_experts_per_tok
        with self.scope(weights, chosen, wide, chosen, chosen):  # chosen, sorted, and their order
            self.take(entries)
            with self.scope(several * inner, 2 * inner, max(x, inner)):
                pass
            with self.scope(inner, wide, wide):
                pass
        return self.take(x)

    # ---- log-probabilities and tokens

    def compute_logits(self, rows: int) -> int:
        size = rows * self.spec.vocab_size
        logits = self.take(self.itemsize * rows * self.spec.vocab_rows)
        if self.num_ranks > 1:
            collected = self.take(2 * self.itemsize * size)
            self.free(logits)
            logits = collected
        if self.is_fp32:
            return logits
        wide = self.take(FP32 * size)
        self.free(logits)
        return wide

    def score(self, rows: int, max_logprobs: int) -> None:
        vocab, column = self.spec.vocab_size, INT64 * rows
        count = vocab if max_logprobs == -1 else min(max_logprobs, vocab)
        with self.scope(column, FP32 * rows * vocab):  # token ids, log-probabilities
            with self.scope(FP32 * rows, BOOL * rows * vocab, column):
                pass
            self.take(column, (FP32 + INT64) * rows * count)

    def draw(self, rows: int, vocab: int) -> None:
        """Its noise takes the most, next to the sorted scores and their tokens."""
        numbers = FP64 * rows * vocab
        with self.scope((FP32 + INT64) * rows * vocab, BOOL * rows, INT64 * rows, 4 * numbers):
            pass
