"""KV groups: layers that keep the same tokens, and where the KV of each layer is.

A layer with a sliding window needs the keys of its window alone, so its blocks that lie behind the window are released.
Layers that release alike form a group, with a block table of its own in every sequence. All groups share one pool: a
block belongs to one group and has `planes` layers of its tokens, as many bytes whatever the group.
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


def first_visible_block(context_len: int, window: int | None, block_size: int) -> int:
    """Index of the first block that a query at position `context_len` or later can see."""
    return 0 if window is None else max(0, context_len - window + 1) // block_size


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

        chunk: most tokens of it in a step; None: any number. Beside them a window needs the keys before the chunk.
        """
        keys = self.most_tokens(tokens, chunk)  # neighbours, which may begin anywhere in a block
        return min(self.num_blocks(tokens), self.num_blocks(keys - 1) + 1)

    def most_tokens(self, tokens: int, chunk: int | None) -> int:
        """The most tokens whose K/V such a sequence needs at once."""
        return tokens if self.window is None or chunk is None else min(tokens, self.window - 1 + chunk)


@dataclass(frozen=True)
class KVGroups:
    """The groups of a model. `planes`: layers of a block; a group may have fewer layers."""

    groups: tuple[KVGroup, ...]
    planes: int

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[KVGroup]:
        return iter(self.groups)

    def __getitem__(self, index: int) -> KVGroup:
        return self.groups[index]

    @cached_property
    def of_layer(self) -> tuple[tuple[int, int], ...]:
        """For each layer of the model the index of its group, and its plane in the group's blocks."""
        where = {
            layer: (index, plane)
            for index, group in enumerate(self.groups)
            for plane, layer in enumerate(group.layers)
        }
        return tuple(where[layer] for layer in range(len(where)))

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
    """What a KV cache of `num_blocks` blocks can hold, of which admission leaves `watermark` free.

    chunk: most tokens of a sequence in a step; None: any number.
    """

    groups: KVGroups
    chunk: int | None
    num_blocks: int
    watermark: int

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


def kv_groups(windows: Sequence[int | None], block_size: int) -> KVGroups:
    """The groups of layers with these sliding windows; None sees all keys.

    Layers that are alike are one group, with a plane for each layer. Otherwise layers with the same window fill as many
    groups as they need.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    planes = num_planes(windows)
    groups = (
        KVGroup(window, block_size, tuple(layers[first : first + planes]))
        for window, layers in sorted(kinds.items(), key=lambda kind: kind[0] is not None)  # full attention first
        for first in range(0, len(layers), planes)
    )
    return KVGroups(tuple(groups), planes)


def num_planes(windows: Sequence[int | None]) -> int:
    """Layers of a block: at most those of the rarest window, so that few planes stay empty in few groups.

    An empty plane and a further group cost alike: memory of every block, or a block table of every sequence.
    """
    counts = Counter(windows).values()

    def cost(planes: int) -> int:
        groups = sum(-(-count // planes) for count in counts)
        return groups * planes - len(windows) + groups

    return min(range(min(counts), 0, -1), key=cost)
