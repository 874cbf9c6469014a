"""KV groups: layers that keep the same tokens, and where the KV of each layer is.

A layer with a sliding window needs the keys of its window alone, so its blocks that lie behind the window are released.
Layers with the same window and the same heads form a group, and each sequence has a block table for each group. All
groups share one pool: a block belongs to one group and holds its tokens in `planes` layers. All blocks take the same
memory, so that a group whose heads are fewer or smaller has more tokens in a block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

HOLE = -1  # in a block table, where no block is held
ANY_LENGTH = 1 << 62  # tokens: longer than any sequence
HASH_BLOCK_SIZES = range(64, 257)  # tokens: many for one hash, and few beside a prompt that is worth caching


def first_visible_block(context_len: int, window: int | None, block_size: int) -> int:
    """Index of the first block that a query at position `context_len` or later can see."""
    return 0 if window is None else max(0, context_len - window + 1) // block_size


def hash_block_size_of(block_size: int) -> int:
    """Tokens in a hash block: the largest divisor of `block_size` in HASH_BLOCK_SIZES, or all if it has none there."""
    return next((size for size in reversed(HASH_BLOCK_SIZES) if block_size % size == 0), block_size)


def hash_unit_of(block_size: int) -> int:
    """The size in tokens of which all other block sizes should be a multiple, so that hash blocks fit all of them."""
    return next((size for size in HASH_BLOCK_SIZES if block_size % size == 0), block_size)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that keep the same tokens, in the order of their planes."""

    window: int | None  # keys that a query sees, its own included; None: all
    block_size: int  # tokens
    layers: tuple[int, ...]

    def num_blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens, none of them released."""
        return -(-tokens // self.block_size)

    def first_visible(self, position: int) -> int:
        """Index of the first block that a query at this position or later can see."""
        return first_visible_block(position, self.window, self.block_size)

    def most_blocks(self, tokens: int, chunk: int | None) -> int:
        """The most blocks that a sequence of `tokens` tokens holds at once.

        chunk: most tokens of it in a step; None: any number. A window needs the keys before the chunk too.
        """
        keys = self.most_tokens(tokens, chunk)  # neighbours, of which the first may be anywhere in a block
        return min(self.num_blocks(tokens), self.num_blocks(keys - 1) + 1)

    def most_tokens(self, tokens: int, chunk: int | None) -> int:
        """The most tokens whose K/V such a sequence needs at once."""
        return tokens if self.window is None or chunk is None else min(tokens, self.window - 1 + chunk)


@dataclass(frozen=True)
class KVGroups:
    """The groups of a model. `planes`: layers of a block; a group may have fewer layers."""

    groups: tuple[KVGroup, ...]
    planes: int
    # The last layers may have no K and V of their own: for each of them, the earlier layer whose K and V it reads.
    shared: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[KVGroup]:
        return iter(self.groups)

    def __getitem__(self, index: int) -> KVGroup:
        return self.groups[index]

    @cached_property
    def of_layer(self) -> tuple[tuple[int, int], ...]:
        """For each layer of the model the index of its group, and its plane in the group's blocks.

        Layers that read the K and V of another one come last.
        """
        where = {
            layer: (index, plane) for index, group in enumerate(self.groups) for plane, layer in enumerate(group.layers)
        }
        return tuple(where[layer] for layer in (*range(len(where)), *self.shared))

    def is_shared(self, layer: int) -> bool:
        """Whether a layer reads the K and V of an earlier one."""
        return layer >= len(self.of_layer) - len(self.shared)

    @cached_property
    def num_readers(self) -> tuple[int, ...]:
        """For each group how many layers attend to its blocks, with those that have no K and V of their own."""
        readers = Counter(group for group, _ in self.of_layer)
        return tuple(readers[index] for index in range(len(self.groups)))

    @property
    def block_size(self) -> int:
        """Tokens in the smallest blocks."""
        return min(group.block_size for group in self.groups)

    @property
    def block_sizes(self) -> str:
        """The numbers of tokens in a block, for messages."""
        return " or ".join(str(size) for size in sorted({group.block_size for group in self.groups}))

    def __str__(self) -> str:
        """Such as `3 layers keep all tokens, 15 the last 512`."""
        counts: dict[int | None, int] = {}
        for group in self.groups:
            counts[group.window] = counts.get(group.window, 0) + len(group.layers)
        kept = [("all tokens" if window is None else f"the last {window:,}", count) for window, count in counts.items()]
        (first, count), *others = kept
        verb = "keeps" if count == 1 else "keep"
        layers = f"{count} layer{'s' * (count > 1)} {verb} {first}"
        return ", ".join([layers, *(f"{number} {tokens}" for tokens, number in others)])

    @property
    def common_block_size(self) -> int:
        """The largest number of tokens that divides the blocks of all groups."""
        return gcd(*(group.block_size for group in self.groups))

    def most_blocks(self, tokens: int, chunk: int | None) -> int:
        """The most blocks that a sequence of `tokens` tokens holds at once; chunk: most tokens of it in a step."""
        return sum(group.most_blocks(tokens, chunk) for group in self.groups)

    def longest_sequence(self, num_blocks: int, chunk: int | None) -> int:
        """Tokens of the longest sequence that never holds more than `num_blocks` blocks.

        ANY_LENGTH if every group has a window and these fit.
        """
        if self.most_blocks(ANY_LENGTH, chunk) <= num_blocks:
            return ANY_LENGTH
        lengths = range(1, max(0, num_blocks) * max(group.block_size for group in self.groups) + 1)
        return bisect_right(lengths, num_blocks, key=lambda tokens: self.most_blocks(tokens, chunk))


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """What a KV cache can hold."""

    groups: KVGroups
    chunk: int | None  # most tokens of a sequence in a step; None: any number
    num_blocks: int
    watermark: int  # blocks that admission leaves free

    @property
    def available(self) -> int:
        """Blocks that a request alone can hold."""
        return self.num_blocks - self.watermark

    @property
    def max_sequence_tokens(self) -> int:
        """Length of the longest sequence that can be admitted."""
        return self.groups.longest_sequence(self.available, self.chunk)

    def most_blocks(self, tokens: int) -> int:
        """The most blocks that a sequence of `tokens` tokens holds at once."""
        return self.groups.most_blocks(tokens, self.chunk)

    def most_shared_blocks(self, prompt_len: int, lengths: Sequence[int]) -> int:
        """The most blocks that sequences of these lengths hold at once, which share the full blocks of their prompt."""
        return sum(self._most_shared(group, prompt_len, lengths) for group in self.groups)

    def _most_shared(self, group: KVGroup, prompt_len: int, lengths: Sequence[int]) -> int:
        shared = prompt_len // group.block_size
        apart = sum(group.most_blocks(tokens, self.chunk) for tokens in lengths)
        return min(apart, shared + sum(group.num_blocks(tokens) - shared for tokens in lengths))


Heads = tuple[int, int]  # KV heads of a layer, and head_dim
KVKind = tuple[int | None, int, Heads | None]  # window, tokens in a block, and heads, where layers differ in them


def kv_groups(
    windows: Sequence[int | None],
    block_size: int | Sequence[int],
    heads: Sequence[Heads] = (),
    shared: Sequence[int] = (),
) -> KVGroups:
    """The groups of layers with these sliding windows; None sees all keys.

    Layers that are all alike are one group, with a plane for each layer. Otherwise the layers of each kind fill as many
    groups as they need.

    block_size: tokens in a block, one number for all layers or one for each. heads: of each layer; () if they are
    alike. shared: as in `KVGroups`.
    """
    sizes = [block_size] * len(windows) if isinstance(block_size, int) else block_size
    of_heads: Sequence[Heads | None] = heads or [None] * len(windows)
    of_layers: list[KVKind] = list(zip(windows, sizes, of_heads, strict=True))
    kinds: dict[KVKind, list[int]] = {}
    for layer, kind in enumerate(of_layers):
        kinds.setdefault(kind, []).append(layer)
    planes = num_planes(of_layers)
    groups = (
        KVGroup(window, size, tuple(layers[first : first + planes]))
        for (window, size, _), layers in sorted(kinds.items(), key=lambda kind: kind[0][0] is not None)  # full first
        for first in range(0, len(layers), planes)
    )
    return KVGroups(tuple(groups), planes, tuple(shared))


def num_planes(kinds: Sequence[KVKind]) -> int:
    """Layers of a block: at most those of the rarest kind, so that few planes stay empty in few groups.

    An empty plane and a further group cost alike: memory of every block, or a block table of every sequence.
    """
    counts = Counter(kinds).values()

    def cost(planes: int) -> int:
        groups = sum(-(-count // planes) for count in counts)
        return groups * planes - len(kinds) + groups

    return min(range(min(counts), 0, -1), key=cost)
