"""The executor of one process: takes batches through the layers of the model, and samples. Tensors begin here.

Sequences go chunk by chunk (`ChunkedPass`) or layer by layer (`features/layerwise_prefill`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.data.batch import Adapter, Batch, Sample, SamplingRow, ScheduledSequence, StepResult, TokenLogprobs
from nanovllm.device import Busy, Device
from nanovllm.errors import EngineError, told
from nanovllm.kvcache.base import KVCacheBase, KVStats, StepTraffic
from nanovllm.layers.forward_context import ForwardContext, KVCache, WatchedKVCache
from nanovllm.layers.linear import RowAdapters
from nanovllm.layers.logits import process
from nanovllm.layers.row_limits import LOGPROB_ROWS
from nanovllm.layers.sampler import NOT_FINITE, sample, token_logprobs
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.sizing import KVPlan
from nanovllm.models.decoder import Decoder
from nanovllm.ops.attention import SequenceMetadata
from nanovllm.ops.upload import upload

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ComputedRows:
    """Hidden states of sequences after the final norm."""

    hidden: Tensor  # [rows, hidden]
    sequences: Sequence[ScheduledSequence]
    # The first row of each sequence. `start + len(token_ids) - 1` is always its last row, from which it samples: a pass
    # that keeps only the last row of a sequence gives a start before the first row.
    starts: Sequence[int]
    # The most likely token of each row, or NOT_FINITE, faster than with `Decoder.compute_logits`. Call it last, since
    # it may overwrite `hidden`.
    likeliest: Callable[[], Sequence[int]] | None = None


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """The sequences of a step that go through the layers chunk by chunk, one after the other."""

    inputs: Tensor  # int64 [3, rows] on the host: token ids, positions and RoPE lengths
    sequences: tuple[SequenceMetadata, ...]
    scheduled: Sequence[ScheduledSequence]

    @property
    def adapters(self) -> Sequence[tuple[int | None, int]]:
        """The adapter of each sequence, and its number of rows."""
        return [(seq.adapter, len(seq.token_ids)) for seq in self.scheduled]


class StepWatch:
    """Calls `on_layer` during a step with the share of the step's work that is done, in tokens times layers."""

    def __init__(self, num_layers: int) -> None:
        self.on_layer: Callable[[float], None] | None = None
        self._num_layers = num_layers
        self._begun = self._total = 0

    def begin_step(self, batch: Batch) -> Callable[[int], None]:
        """Start to count the layers of a step. Call the result before each layer, with the number of its tokens."""
        self._begun = 0
        self._total = batch.token_layers(self._num_layers)
        return self._report

    def _report(self, tokens: int) -> None:
        """Call `on_layer`. An error in it is logged and does not fail the step."""
        done = self._begun
        self._begun += tokens
        try:
            if self.on_layer is not None:
                self.on_layer(done / self._total)
        except Exception:
            self.on_layer = None
            logger.exception("the function that watches the steps has failed, and is not called again")


class ForwardPass(Protocol):
    """Computes those sequences of a batch that go through the layers in this way.

    In each step the runner calls `begin_step` of its passes, then `run` of those that take part, both in one fixed
    order.
    """

    def begin_step(self, batch: Batch) -> StepTraffic | None:
        """Start the step's loads. Returns the KV bytes that each of its sequences moves, or None if it has none."""
        ...

    def run(self, on_attend: Callable[[int], None] | None) -> ComputedRows:
        """Compute the step. on_attend: called before each layer's attention, with the number of its tokens."""
        ...

    def abandon_step(self) -> None:
        """The step failed: make the pass usable for the next one."""
        ...


class DecodeRunner(Protocol):
    """Runs decode steps in a faster way than calling the model, where it can take them."""

    def run(self, batch: FlatBatch, kv_cache: KVCache) -> ComputedRows | None:
        """The rows of a step, valid until the next step; None if it cannot compute them."""
        ...

    def forget(self) -> None:
        """Blocks have moved, or a step failed: what was computed ahead of the next step is not that step's."""
        ...


class RecordedAdapters(Protocol):
    """The adapters of rows whose products are recorded before the rows are known."""

    def of_rows(self, rows: int) -> RowAdapters:
        """Those of a step of so many rows, whose content is that of the latest `fill`."""
        ...

    def fill(self, sequences: Sequence[tuple[int | None, int]]) -> None:
        """Take the sequences of a step, as `AdapterManager.of_rows`."""
        ...


class AdapterManager(Protocol):
    """Holds the LoRA adapters of the running requests on the device."""

    def begin_step(self, adapters: Sequence[Adapter]) -> Mapping[int, str]:
        """Load the adapters of all running requests. Returns why some cannot be loaded, by their number."""
        ...

    def of_rows(self, sequences: Sequence[tuple[int | None, int]]) -> Sequence[RowAdapters | None]:
        """`ForwardContext.adapters` of a batch, from each sequence's adapter and its number of rows, in order."""
        ...

    def recorded(self, most_rows: int) -> RecordedAdapters | None:
        """The adapters of steps of at most so many rows; None if their products cannot be recorded."""
        ...


class ChunkedPass:
    """All sequences of a step form one flat batch, which goes through all layers."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCacheBase,
        decode_runner: DecodeRunner | None,
        adapters: AdapterManager | None = None,
        hidden: Callable[[Sequence[ScheduledSequence]], Tensor] | None = None,
    ) -> None:
        """hidden: gives `ForwardContext.hidden` of a batch, for a model that reads it."""
        self._model = model
        self._adapters = adapters
        self._hidden = hidden
        self._kv_cache = kv_cache
        self.decode_runner = decode_runner
        self._sequences: Sequence[ScheduledSequence] = ()
        self._metadata: tuple[SequenceMetadata, ...] = ()

    def begin_step(self, batch: Batch) -> StepTraffic | None:
        """Carry out the block moves of the batch and start the loads of its chunks."""
        self._sequences = batch.chunked
        starts = accumulate((len(seq.token_ids) for seq in self._sequences), initial=0)  # in the flat batch
        self._metadata = tuple(
            SequenceMetadata.full(start, len(seq.token_ids), seq.context_len, *seq.block_tables)
            for start, seq in zip(starts, self._sequences, strict=False)
        )
        if self.decode_runner is not None and (batch.moves or batch.state_moves):
            self.decode_runner.forget()
        traffic = self._kv_cache.begin_step(self._metadata, batch.moves, batch.state_moves)
        return traffic if self._sequences else None

    def run(self, on_attend: Callable[[int], None] | None) -> ComputedRows:
        sequences = self._metadata
        token_ids = torch.tensor([token for seq in self._sequences for token in seq.token_ids], dtype=torch.int64)
        query_lens = torch.tensor([len(seq.token_ids) for seq in self._sequences])
        # For each sequence the difference between the position of a row and its index in the batch.
        offsets = torch.tensor([part.context_len - part.query_start for part in sequences])
        positions = torch.arange(len(token_ids)) + offsets.repeat_interleave(query_lens)
        inputs = torch.stack((token_ids, positions))  # on the host
        kv_cache: KVCache = self._kv_cache if on_attend is None else WatchedKVCache(self._kv_cache, on_attend)
        batch = FlatBatch(inputs, sequences, self._sequences)
        if self.decode_runner is not None and (rows := self.decode_runner.run(batch, kv_cache)) is not None:
            return rows
        adapters = self._adapters.of_rows(batch.adapters) if self._adapters is not None else ()
        token_ids, positions = upload(inputs, self._model.device)
        pool = self._kv_cache.pools.states
        slots = [seq.state_slot for seq in self._sequences]
        num_kept = [len(seq.token_ids) if seq.num_drafts else 0 for seq in self._sequences]
        states = None
        if pool is not None:
            states = pool.of_step([slot for slot in slots if slot is not None], num_kept)
        read = self._hidden(self._sequences) if self._hidden is not None else None
        context = ForwardContext(positions, sequences, kv_cache, adapters, states, read)
        hidden = self._model(token_ids, context)
        return ComputedRows(hidden, self._sequences, [sequence.query_start for sequence in sequences])

    def abandon_step(self) -> None:
        if self.decode_runner is not None:
            self.decode_runner.forget()
        self._kv_cache.abandon_step()


class ModelRunner:
    """Owns the device, the model and the KV cache, and runs one batch at a time. `build.build_runner` makes it."""

    def __init__(
        self,
        device: Device,
        model: Decoder,
        kv_cache: KVCacheBase,
        passes: Sequence[ForwardPass],
        sizing: KVSizing,
        plan: KVPlan,
        num_swap_blocks: int,
        adapters: AdapterManager | None = None,
    ) -> None:
        """passes: the forward pass chunk by chunk, then the one layer by layer if prompts may go that way."""
        self.device = device
        self.model = model
        self.kv_cache = kv_cache
        self.passes = passes
        self.sizing = sizing
        self.plan = plan
        self.num_swap_blocks = num_swap_blocks
        self.adapters = adapters
        self.spec = model.spec  # of this rank
        self.dtype = model.dtype
        # Called with the rows of every pass, which stay valid until the next step.
        self.keep_rows: Callable[[ComputedRows], None] | None = None
        self._closed = False
        self._was_layerwise = False  # whether the last step had a part of a layer-by-layer prefill
        self._watch = StepWatch(model.spec.num_kv_layers)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Run one step. After a failure the runner can be used again; the KV that the step was writing is undefined."""
        self.check_health()
        # Layer-by-layer prefill also takes part in the step after its last, to drop what it kept between two steps.
        passes = self.passes if batch.layerwise is not None or self._was_layerwise else self.passes[:1]
        self._was_layerwise = batch.layerwise is not None
        result = StepResult()
        on_attend = self._watch.begin_step(batch) if self._watch.on_layer is not None else None
        try:
            with self.device.compute():
                unloaded = self.adapters.begin_step(batch.adapters) if self.adapters is not None else {}
                begun = [(one_pass, moved) for one_pass in passes if (moved := one_pass.begin_step(batch)) is not None]
                for one_pass, moved in begun:
                    rows = one_pass.run(on_attend)
                    sample_rows(self.model, rows, result, lambda: self._why_not_finite)
                    if self.keep_rows is not None:
                        self.keep_rows(rows)
                    result.h2d_bytes.extend(moved.h2d_bytes)
                    result.d2h_bytes.extend(moved.d2h_bytes)
                self.kv_cache.end_step()
        except BaseException:
            for one_pass in self.passes:
                one_pass.abandon_step()
            raise
        for index, seq in enumerate(batch.sequences):
            if seq.adapter is not None and seq.adapter in unloaded:
                result.errors[index] = unloaded[seq.adapter]
        return result

    def check_health(self) -> None:
        """Raise EngineError if no step can run any more."""
        if self._closed:
            raise EngineError("the engine is closed: make a new LLM")

    def advise(self, num_tokens: int) -> str:
        """See `Executor`."""
        return self.sizing.advice(num_tokens)

    def watch_steps(self, on_layer: Callable[[float], None] | None) -> Callable[[float], None] | None:
        """See `LLM.watch_steps`."""
        before = self._watch.on_layer
        self._watch.on_layer = on_layer
        return before

    def kv_stats(self) -> KVStats:
        return self._last_stats if self._closed else self.kv_cache.stats()

    def link_busy(self) -> Busy:
        """Bytes copied to the device so far, or in a sample of the copies, and the seconds during which they ran."""
        return self.device.link_busy()

    def close(self) -> None:
        """End the device's streams, release weights and KV cache. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._last_stats = self.kv_cache.stats()
            try:
                self.device.close()
            finally:
                del self.model, self.kv_cache, self.passes, self.adapters

    @cached_property
    def _why_not_finite(self) -> str:
        return explain_non_finite_logits(self.model)


EVERYTHING_BANNED = (
    "no token is left to choose: logit_bias, bad_words, min_tokens, allowed_token_ids, structured_outputs and "
    "logits_processors together ban all of them; ban fewer"
)
MOST_NAMED = 3  # weights in an error message


def sample_rows(model: Decoder, rows: ComputedRows, result: StepResult, why_not_finite: Callable[[], str]) -> None:
    """Append the sequences of `rows` to `result`: the tokens that are due, and the asked prompt log-probabilities.

    why_not_finite: gives the error of a sequence whose logits hold NaN or infinity. The samples of a sequence with an
    error are meaningless.
    """
    first = len(result.samples)
    result.samples.extend([] for _ in rows.sequences)
    result.prompt_logprobs.extend([] for _ in rows.sequences)
    if any(seq.prompt_targets is not None for seq in rows.sequences):
        for i in _measure_prompts(model, rows, result.prompt_logprobs[first:]):
            result.errors[first + i] = why_not_finite()
    for i, error in _draw_samples(model, rows, result.samples[first:]).items():
        result.errors[first + i] = error if error is not None else why_not_finite()


def _draw_samples(model: Decoder, rows: ComputedRows, samples: list[list[Sample]]) -> dict[int, str | None]:
    """Append the tokens of each sequence's `samples`.

    Returns errors by index of a sequence; the error is None if the logits are not finite.
    """
    hidden = rows.hidden
    sequences = rows.sequences
    due = [(i, row) for i, seq in enumerate(sequences) for row in seq.samples]
    if not due:
        return {}
    sampling = [row for _, row in due]
    drawn_rows = [row for i in range(len(sequences)) for row in _drawn_rows(rows, i)]
    if rows.likeliest is not None and all(row.takes_likeliest for row in sampling):
        of_rows = rows.likeliest()
        return _count_samples(sequences, due, [of_rows[row] for row in drawn_rows], {}, samples, None)
    logits = model.compute_logits(hidden[upload(torch.tensor(drawn_rows), hidden.device)])
    if not model.has_logits:
        return {}
    has_processors = any(row.processors is not None for row in sampling)
    processed, errors = _processed(logits, sampling) if has_processors else ({}, {})
    return _count_samples(sequences, due, sample(logits, sampling, processed), errors, samples, logits)


def _count_samples(
    sequences: Sequence[ScheduledSequence],
    due: Sequence[tuple[int, SamplingRow]],
    tokens: Sequence[int],
    errors: Mapping[int, str],
    samples: list[list[Sample]],
    logits: Tensor | None,
) -> dict[int, str | None]:
    """Append those tokens that count to the `samples` of their sequences; see `_draw_samples`.

    due: of each token the index of its sequence, and how it was drawn; errors: by place among them. logits: [due,
    vocab], None if no log-probabilities are asked.
    """
    failed: dict[int, str | None] = {}
    counting = _Counting(sequences)
    for position, ((i, row), token) in enumerate(zip(due, tokens, strict=True)):
        error = errors.get(position) or (row.mask.error if row.mask is not None else None)
        is_wrong = error is not None or token < 0
        if not counting.count(position, i, token, is_wrong) or not is_wrong:
            continue
        if token == NOT_FINITE:
            failed[i] = None
        else:
            failed.setdefault(i, error or EVERYTHING_BANNED)
    drawn = enumerate(due)
    counts = [row.num_logprobs if i not in failed and at in counting.positions else None for at, (i, row) in drawn]
    asked = any(count is not None for count in counts)
    assert logits is not None or not asked, "log-probabilities need logits"
    logprobs = [None] * len(due) if logits is None or not asked else token_logprobs(logits, tokens, counts)
    for position, ((i, _), token, of_token) in enumerate(zip(due, tokens, logprobs, strict=True)):
        if position in counting.positions:
            samples[i].append(Sample(token, of_token))
    return failed


def _drawn_rows(rows: ComputedRows, index: int) -> Iterator[int]:
    """The rows from which the `samples` of a sequence are drawn."""
    seq = rows.sequences[index]
    last = rows.starts[index] + len(seq.token_ids) - 1
    for place in range(len(seq.samples)):
        yield last - seq.num_drafts + place if seq.num_drafts else last


class _Counting:
    """Which of the draws count. With drafts they count up to the first that is not the drafted token.

    After an accepted draft, a draw that fails (everything is banned) does not count: the next step draws it again,
    unless the sequence has ended before it. With drafts, draws from logits that are not finite do not count: attention
    multiplies the value of a later token by 0, so that a draft whose value is infinite spoils the rows before it.
    """

    def __init__(self, sequences: Sequence[ScheduledSequence]) -> None:
        self.positions: set[int] = set()  # of the draws that count
        self._drafts = [seq.drafts if seq.num_drafts else None for seq in sequences]
        self._accepted = [0] * len(sequences)  # drafts so far; -1 once one was refused

    def count(self, position: int, index: int, token: int, is_wrong: bool) -> bool:
        """Whether the next draw of a sequence counts."""
        drafts = self._drafts[index]
        accepted = self._accepted[index]
        if drafts is not None:
            if accepted < 0 or (is_wrong and accepted > 0) or token == NOT_FINITE:
                self._accepted[index] = -1
                return False
            is_right = accepted < len(drafts) and token == drafts[accepted]
            self._accepted[index] = accepted + 1 if is_right else -1
        self.positions.add(position)
        return True


def _processed(logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[dict[int, Tensor], dict[int, str]]:
    """Logits [vocab] and errors of the rows with logits processors, by row."""
    changed: dict[int, Tensor] = {}
    errors: dict[int, str] = {}
    for index, row in enumerate(rows):
        if row.processors is not None:
            try:
                changed[index] = process(logits[index], row.processors)
            except Exception as error:  # a caller's function may raise any type
                errors[index] = f"a logits processor has failed: {told(error)}"
    return changed, errors


def _measure_prompts(model: Decoder, rows: ComputedRows, results: list[list[TokenLogprobs]]) -> set[int]:
    """Append the log-probabilities of each sequence's `prompt_targets`.

    Returns the indices of sequences whose logits are not finite. Computes the logits of LOGPROB_ROWS rows at a time, to
    bound their memory.
    """
    failed: set[int] = set()
    for i, (seq, start) in enumerate(zip(rows.sequences, rows.starts, strict=True)):
        targets = seq.prompt_targets
        for begin in range(0, len(targets.token_ids) if targets is not None else 0, LOGPROB_ROWS):
            assert targets is not None
            token_ids = targets.token_ids[begin : begin + LOGPROB_ROWS]
            first = start + targets.first_row + begin
            logits = model.compute_logits(rows.hidden[first : first + len(token_ids)])
            if not model.has_logits:
                continue
            logprobs = token_logprobs(logits, token_ids, [targets.num_logprobs] * len(token_ids))
            if not is_finite(logits):
                failed.add(i)
            results[i].extend(row for row in logprobs if row is not None)
    return failed


def explain_non_finite_logits(model: Decoder) -> str:
    """A sentence that says which weights hold NaN or infinity, or that it was computed. Reads all weights."""
    damaged = [name for name, slot in model.slots() if not is_finite(slot.view)]
    if damaged:
        named = ", ".join(damaged[:MOST_NAMED])
        others = f" and {len(damaged) - MOST_NAMED} more" if len(damaged) > MOST_NAMED else ""
        return f"the logits hold NaN or infinity, and so do the weights, in {named}{others}: get the checkpoint anew"
    if model.group is not None:
        return (
            "the logits hold NaN or infinity, which was computed, or is in weights that another rank holds: those of "
            "the first are finite; run one rank to see which, or get the checkpoint anew"
        )
    dtype = str(model.dtype).removeprefix("torch.")
    advice = "use dtype='bfloat16' or 'float32'" if model.dtype is torch.float16 else "check the checkpoint's config"
    return (
        f"the logits hold NaN or infinity, which was computed: all weights are finite, and {dtype} ends at "
        f"{torch.finfo(model.dtype).max:.3g}: {advice}"
    )


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite. Allocates nothing of the tensor's size."""
    return tensor.numel() == 0 or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
