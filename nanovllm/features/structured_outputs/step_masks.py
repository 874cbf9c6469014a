"""Token masks of structured outputs in the batch of each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nanovllm.data.batch import Batch, SamplingRow, ScheduledSequence, TokenMask
from nanovllm.engine.request import Sequence as TokenSequence
from nanovllm.engine.resolved_sampling import GrammarCompiler, GrammarState
from nanovllm.engine.step_hook import StepHook


class StepMasks(StepHook):
    """Masks the rows of sequences whose request has a grammar. The masks are made while the step computes."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        """compiler: of these grammars; it is closed with the hook."""
        self._compiler = compiler

    def built(self, batch: Batch, sequences: list[TokenSequence]) -> None:
        for scheduled, seq in zip(batch.sequences, sequences, strict=True):
            if scheduled.samples and seq.request.sampling.grammar is not None:
                scheduled.samples = self._masked(seq, scheduled)

    def _masked(self, seq: TokenSequence, scheduled: ScheduledSequence) -> list[SamplingRow]:
        rows = iter(scheduled.samples)
        masked: list[SamplingRow] = []
        for sampling in seq.request.sampled_from(seq):
            masked += [replace(next(rows), mask=mask) for mask in self._masks(sampling, scheduled.drafts)]
        return masked

    def _masks(self, seq: TokenSequence, drafts: Sequence[int]) -> Sequence[TokenMask]:
        """The mask of a sequence's next token, and those after each of the drafts."""
        state = self._state(seq)
        new = seq.token_ids[seq.prompt_len + state.num_read :]
        ends = range(seq.num_output_tokens, seq.num_output_tokens + len(drafts) + 1)
        return state.masks(new, drafts, [end < seq.params.min_tokens for end in ends])

    def _state(self, seq: TokenSequence) -> GrammarState:
        """How much of its output is read. It outlives preemption, which loses no tokens."""
        grammar = seq.request.sampling.grammar
        assert grammar is not None
        if self not in seq.ext:
            seq.ext[self] = grammar.start()
        state: GrammarState = seq.ext[self]
        return state

    def close(self) -> None:
        self._compiler.close()
