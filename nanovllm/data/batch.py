"""The data that the engine and the runner exchange: plain and picklable in both directions."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol


def token_array(token_ids: Iterable[int] = ()) -> array[int]:
    """Token ids in a compact form, which is pickled and joined as bytes."""
    return array("q", token_ids)


@dataclass(frozen=True, slots=True)
class Adapter:
    """One content of the files of an adapter."""

    number: int  # its identity within an engine, from 1; other content has another number
    request: Any  # the `LoRARequest` that names it
    directory: Path  # of its files
    stamp: tuple[int, ...]  # sizes and times of the files, by which an executor recognises the content


@dataclass(frozen=True, slots=True)
class LayerwisePrefill:
    """Positions [begin, end) of a sequence, prefilled layer by layer in chunks of `chunk` tokens.

    A *layer chunk* is one chunk in one layer with K and V, and in the recurrent layers before it. Layer chunks are
    numbered in the order in which they run: all chunks of layer 0, then all of layer 1, and so on. A step runs a few of
    them.

    snapshots: positions, ascending, where chunks end, and the state slots to which recurrent states are copied there.
    """

    begin: int
    end: int
    chunk: int
    snapshots: tuple[tuple[int, int], ...] = ()

    @property
    def num_chunks(self) -> int:
        return sum(-(-len(part) // self.chunk) for part in self._parts())

    def layer(self, layer_chunk: int) -> int:
        return layer_chunk // self.num_chunks

    def positions(self, layer_chunk: int) -> range:
        """Positions of the layer chunk's tokens."""
        index = layer_chunk % self.num_chunks
        for part in self._parts():
            first = part.start + index * self.chunk
            if first < part.stop:
                return range(first, min(first + self.chunk, part.stop))
            index -= -(-len(part) // self.chunk)
        raise AssertionError("a layer chunk is a part of the prefill")

    def _parts(self) -> Iterator[range]:
        """The positions up to each snapshot, and those after the last one."""
        edges = [self.begin, *(position for position, _ in self.snapshots), self.end]
        return (range(begin, end) for begin, end in pairwise(edges))


@dataclass(frozen=True, slots=True)
class LayerwiseStep:
    """Layer chunks [first_layer_chunk, end_layer_chunk) of a layer-by-layer prefill, which one step runs."""

    layerwise: LayerwisePrefill
    first_layer_chunk: int
    end_layer_chunk: int

    @property
    def token_layers(self) -> int:
        """Tokens times layers that the step computes."""
        layer_chunks = range(self.first_layer_chunk, self.end_layer_chunk)
        return sum(len(self.layerwise.positions(layer_chunk)) for layer_chunk in layer_chunks)


class Tier(Enum):
    """The kinds of KV memory. SWAP holds the blocks of preempted requests until they run again."""

    DEVICE = "device"
    HOST = "host"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class BlockMove:
    """A copy of all planes of a block between two physical block ids. Moves of a step are carried out in order."""

    src: int
    dst: int
    keeps_source: bool = False  # the block at `src` stays in use, as in copy-on-write; the copy is the same
    num_tokens: int | None = None  # copy only the first tokens of the block; None copies it whole
    group: int = 0  # index of its KV group, which says where these tokens are


@dataclass(frozen=True, slots=True)
class StateMove:
    """A copy of a recurrent state between two state slots. Moves of a step are carried out in order.

    A *replay* is no copy: it runs tokens of the latest pass, which had drafts, through the state in `dst`. They are the
    first `num_replayed` tokens that the pass ran through the state in `src`. Replays come first.
    """

    src: int | None  # None makes `dst` the state before the first token
    dst: int
    num_replayed: int = 0  # 0 for a copy


@dataclass(frozen=True, slots=True)
class LogitAdjustments:
    """Changes to a row's logits before its token is chosen."""

    banned: array[int] = field(default_factory=token_array)  # tokens that cannot be chosen
    biased: array[int] = field(default_factory=token_array)  # tokens with a bias
    biases: array[float] = field(default_factory=lambda: array("d"))  # what is added to the logit of each of these
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    prompt_tokens: array[int] = field(default_factory=token_array)  # distinct ones; none unless a penalty needs them
    output_tokens: array[int] = field(
        default_factory=token_array
    )  # all generated ones; none unless a penalty needs them

    @property
    def penalizes(self) -> bool:
        """Whether a penalty changes the logits of generated tokens."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


class TokenMask(Protocol):
    """The tokens that may be chosen: bit t of `bits` is token t, with the lowest bit of each byte first.

    `error` says why there is no mask. While another thread makes the mask, both properties wait for it, and so does
    pickling.
    """

    @property
    def bits(self) -> bytes: ...
    @property
    def error(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class PackedMask:
    """A TokenMask that is there."""

    bits: bytes = b""
    error: str | None = None

    @classmethod
    def of(cls, token_ids: Iterable[int], vocab_size: int) -> PackedMask:
        """The mask that allows these tokens, which are below `vocab_size`."""
        bits = bytearray(-(-vocab_size // 8))
        for token in token_ids:
            bits[token // 8] |= 1 << token % 8
        return cls(bytes(bits))

    def allows(self, token: int) -> bool:
        """Whether the token may be chosen."""
        return token // 8 < len(self.bits) and bool(self.bits[token // 8] >> token % 8 & 1)


@dataclass(frozen=True, slots=True)
class LogitsProcessors:
    """A caller's functions that change a row's logits. An executor in another process needs ones that can be pickled.

    functions: each is called with the output's token ids and the logits, with the prompt's token ids in front if True
    stands beside it.
    """

    functions: Sequence[tuple[Callable[..., Any], bool]]
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawParams:
    """The fields of SamplingParams that a draw takes under the same names. temperature 0 is greedy; top_k 0 is off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow(DrawParams):
    """How the next token of one sequence is drawn: a pure function of these fields and the logits.

    (seed, index) identifies one random draw of one sequence, also after preemption and recomputation.
    """

    seed: int
    index: int  # how many tokens the sequence has generated before
    num_logprobs: int | None = None  # most likely tokens to report besides the chosen one; None reports nothing
    adjustments: LogitAdjustments | None = None
    mask: TokenMask | None = None
    processors: LogitsProcessors | None = None

    @property
    def takes_likeliest(self) -> bool:
        """Whether the token is the one with the largest logit, and nothing else is reported of the logits."""
        changes = (self.num_logprobs, self.adjustments, self.mask, self.processors)
        return self.temperature == 0 and changes == (None,) * len(changes)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, of the raw logits: before penalties, temperature and cuts."""

    logprob: float  # of the chosen token
    rank: int  # of the chosen token, from 1
    top_token_ids: Sequence[int]  # the most likely tokens, in order
    top_logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Sample:
    """A drawn token."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """Prompt tokens whose log-probabilities a step reports. `token_ids[i]` follows row `first_row + i`."""

    first_row: int  # of the sequence's rows in the step
    token_ids: Sequence[int]
    num_logprobs: int  # as in SamplingRow


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's share of a step: compute `token_ids` at positions [context_len, context_len + len(token_ids)).

    `samples` are the tokens to draw from the logits of the last row. There are none while the prompt is not complete,
    and several where sequences that share the prompt begin. With drafts there is one sample for the row before the
    first draft and one for the row of each draft, drawn as if the drafts before it were right.
    """

    seq_id: int
    token_ids: Sequence[int]
    context_len: int
    prompt_len: int
    # Of each KV group the physical block ids up to the last computed position, with HOLE for blocks not held.
    block_tables: Sequence[Sequence[int]]
    samples: Sequence[SamplingRow] = ()
    prompt_targets: PromptTargets | None = None
    layerwise: LayerwiseStep | None = None  # runs only these layer chunks of `token_ids`; None: they pass all layers
    request_id: str = ""
    adapter: int | None = None  # number of the adapter
    state_slot: int | None = None  # on the device: the recurrent state before `token_ids`, afterwards that after them
    is_complete: bool = True  # its tokens have passed all layers when the step ends
    num_drafts: int = 0  # so many of the last `token_ids` are guesses of what follows

    @property
    def num_kept(self) -> int:
        """Rows of which recurrent layers keep their inputs: all, if the sequence may go back behind some of them."""
        return len(self.token_ids) if self.num_drafts else 0

    @property
    def drafts(self) -> Sequence[int]:
        """The drafted tokens among `token_ids`."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]


@dataclass(slots=True)
class Batch:
    """One step: the block moves and state moves, in order, then the sequences.

    At most one sequence goes layer by layer, and it is the last.
    """

    sequences: Sequence[ScheduledSequence]
    moves: Sequence[BlockMove] = ()
    adapters: Sequence[Adapter] = ()  # of all running requests, also of those that the step does not compute
    state_moves: Sequence[StateMove] = ()

    @property
    def chunked(self) -> Sequence[ScheduledSequence]:
        """The sequences whose tokens go through all layers in this step."""
        return self.sequences if self.layerwise is None else self.sequences[:-1]

    @property
    def layerwise(self) -> ScheduledSequence | None:
        """The sequence that is prefilled layer by layer."""
        return self.sequences[-1] if self.sequences and self.sequences[-1].layerwise is not None else None

    @property
    def num_tokens(self) -> int:
        """Tokens that go through all layers."""
        return sum(len(s.token_ids) for s in self.chunked)

    def token_layers(self, num_layers: int) -> int:
        """Tokens times layers that the step computes."""
        part = None if self.layerwise is None else self.layerwise.layerwise
        return self.num_tokens * num_layers + (0 if part is None else part.token_layers)

    def prompt_tokens(self, num_layers: int) -> float:
        """Prompt tokens that the step computes; those of a layer-by-layer prefill in proportion to their layers."""
        part = None if self.layerwise is None else self.layerwise.layerwise
        chunked = sum(max(0, min(len(s.token_ids), s.prompt_len - s.context_len)) for s in self.chunked)
        return chunked + (0 if part is None else part.token_layers / num_layers)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step. Each list has an element for each scheduled sequence, in batch order."""

    # The tokens drawn for its `samples`. With drafts they end with the first token that is not the drafted one, and
    # there are none if the drafts may have spoiled the logits.
    samples: list[list[Sample]] = field(default_factory=list)
    h2d_bytes: list[int] = field(default_factory=list)  # of KV
    d2h_bytes: list[int] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)  # of its `prompt_targets`
    # What is wrong with the numbers of a sequence, by its index. Its samples are then meaningless.
    errors: dict[int, str] = field(default_factory=dict)
