"""The executor of one process: runs batches through the model, samples. Tensors begin here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.data.batch import Batch, Sample, SamplingRow, ScheduledSequence, StepResult, TokenLogprobs
from nanovllm.device import Busy, Device
from nanovllm.engine.forward_pass import AdapterManager, ComputedRows, ForwardPass, StepWatch
from nanovllm.errors import Advice, EngineError, told
from nanovllm.kvcache.base import KVCacheBase, KVStats
from nanovllm.layers.logits import process
from nanovllm.layers.row_limits import LOGPROB_ROWS
from nanovllm.layers.sampler import NOT_FINITE, sample, token_logprobs
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.sizing import KVPlan
from nanovllm.models.decoder import Decoder
from nanovllm.ops.upload import upload


class StepTrace(Protocol):
    """Writes a timeline of copies and kernels; see `device.trace`."""

    def begin_step(self, sequences: Sequence[ScheduledSequence]) -> None:
        """Work from now on belongs to a step of these sequences."""
        ...


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
        trace: StepTrace | None = None,
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
        self._trace = trace
        self._closed = False
        self._was_layerwise = False  # whether the last step had a part of a layer-by-layer prefill
        self._watch = StepWatch(model.spec.num_layers)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Run one step. After a failure the runner can be used again; the KV that the step was writing is undefined."""
        self.check_health()
        # Layer-by-layer prefill also takes part in the step after its last, to drop what it kept between two steps.
        passes = self.passes if batch.layerwise is not None or self._was_layerwise else self.passes[:1]
        self._was_layerwise = batch.layerwise is not None
        result = StepResult()
        on_attend = self._watch.begin_step(batch) if self._watch.on_layer is not None else None
        if self._trace is not None:
            self._trace.begin_step(batch.sequences)
        try:
            with self.device.compute():
                unloaded = self.adapters.begin_step(batch.adapters) if self.adapters is not None else {}
                begun = [(each, moved) for each in passes if (moved := each.begin_step(batch)) is not None]
                for each, moved in begun:
                    sample_rows(self.model, each.run(on_attend), result, lambda: self._why_not_finite)
                    result.h2d_bytes.extend(moved.h2d_bytes)
                    result.d2h_bytes.extend(moved.d2h_bytes)
                self.kv_cache.end_step()
        except BaseException:
            for each in self.passes:
                each.abandon_step()
            raise
        for index, seq in enumerate(batch.sequences):
            if seq.adapter is not None and seq.adapter in unloaded:
                result.errors[index] = unloaded[seq.adapter]
        return result

    def check_health(self) -> None:
        """Raise EngineError if no step can run any more."""
        if self._closed:
            raise EngineError("the engine is closed: make a new LLM")

    def advise(self, num_tokens: int) -> Advice:
        """What to do about a prompt of `num_tokens` tokens, which is too long for the KV cache."""
        return self.sizing.advice(num_tokens)

    def watch_steps(self, on_layer: Callable[[float], None] | None) -> Callable[[float], None] | None:
        """See `LLM.watch_steps`."""
        before, self._watch.on_layer = self._watch.on_layer, on_layer
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
    """Append the tokens of each sequence's `samples`. Returns errors by index of a sequence, None for logits that are
    not finite.
    """
    hidden, sequences, starts = rows.hidden, rows.sequences, rows.starts
    due = [(i, row) for i, seq in enumerate(sequences) for row in seq.samples]
    if not due:
        return {}
    last_rows = torch.tensor([starts[i] + len(sequences[i].token_ids) - 1 for i, _ in due])
    logits = model.compute_logits(hidden[upload(last_rows, hidden.device)])
    if not model.has_logits:
        return {}
    sampling = [row for _, row in due]
    has_processors = any(row.processors is not None for row in sampling)
    processed, errors = _processed(logits, sampling) if has_processors else ({}, {})
    tokens = sample(logits, sampling, processed)
    failed: dict[int, str | None] = {}
    for position, ((i, row), token) in enumerate(zip(due, tokens, strict=True)):
        error = errors.get(position) or (row.mask.error if row.mask is not None else None)
        if token == NOT_FINITE:
            failed[i] = None
        elif error is not None or token < 0:
            failed.setdefault(i, error or EVERYTHING_BANNED)
    counts = [None if i in failed else row.num_logprobs for i, row in due]
    asked = any(count is not None for count in counts)
    logprobs = token_logprobs(logits, tokens, counts) if asked else [None] * len(due)
    for (i, _), token, found in zip(due, tokens, logprobs, strict=True):
        samples[i].append(Sample(token, found))
    return failed


def _processed(logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[dict[int, Tensor], dict[int, str]]:
    """Logits [vocab] and errors of the rows with logits processors, by row."""
    found: dict[int, Tensor] = {}
    errors: dict[int, str] = {}
    for index, row in enumerate(rows):
        if row.processors is not None:
            try:
                found[index] = process(logits[index], row.processors)
            except Exception as error:  # a caller's function may raise any type
                errors[index] = f"a logits processor has failed: {told(error)}"
    return found, errors


def _measure_prompts(model: Decoder, rows: ComputedRows, results: list[list[TokenLogprobs]]) -> set[int]:
    """Append the log-probabilities of each sequence's `prompt_targets`. Returns the indices of sequences whose logits
    are not finite.

    Computes the logits of LOGPROB_ROWS rows at a time, to bound their memory.
    """
    failed: set[int] = set()
    for i, (seq, start) in enumerate(zip(rows.sequences, rows.starts, strict=True)):
        targets = seq.prompt_targets
        for begin in range(0, len(targets.token_ids) if targets is not None else 0, LOGPROB_ROWS):
            assert targets is not None
            token_ids, first = targets.token_ids[begin : begin + LOGPROB_ROWS], start + targets.first_row + begin
            logits = model.compute_logits(rows.hidden[first : first + len(token_ids)])
            if not model.has_logits:
                continue
            found = token_logprobs(logits, token_ids, [targets.num_logprobs] * len(token_ids))
            if not is_finite(logits):
                failed.add(i)
            results[i].extend(row for row in found if row is not None)
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
