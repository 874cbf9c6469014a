"""The interface of grammars, which keep outputs to a structure: for each sequence the tokens that may come next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from nanovllm.data.batch import PackedMask, TokenMask
from nanovllm.sampling_params import StructuredOutputsParams


class GrammarState(Protocol):
    """How much of one output a grammar has read. num_read: tokens."""

    num_read: int

    def mask(self, token_ids: Sequence[int], hold_end: bool) -> TokenMask:
        """The tokens that may follow once the output has gone on with `token_ids`.

        hold_end: none of the end tokens, as long as others may follow. The mask may still be in the making.
        """
        ...


class Grammar(Protocol):
    """What the outputs of one request match."""

    def start(self) -> GrammarState:
        """The state of an output without tokens."""
        ...


class GrammarCompiler(Protocol):
    """Compiles grammars for one model and tokenizer. Any thread may call it."""

    def compile(
        self, params: StructuredOutputsParams, end_tokens: Collection[int], allowed: PackedMask | None
    ) -> Grammar:
        """The grammar of a request whose outputs end with one of `end_tokens`. allowed: tokens that it may use at all.

        Raises RequestError for a grammar that is invalid, or too large to compile within bounds.
        """
        ...

    def prepare(self, params: StructuredOutputsParams) -> object:
        """Compile a grammar and keep it, so that `compile` finds it. Raises as `compile`; both take up to seconds."""
        ...

    def close(self) -> None:
        """End its threads and processes. Safe to call twice."""
        ...
