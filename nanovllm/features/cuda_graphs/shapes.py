"""The shapes of steps that have CUDA graphs. Their number is bounded whatever the limits of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nanovllm.config import EngineConfig

LARGEST = 512  # rows of a recorded step
LARGEST_BETWEEN = 64  # where attention or weights come between graphs, of which a shape has some for each such layer
MOST_ALONE = 8  # rows of a sequence alone up to which each number of them has graphs of its own
MOST_WITH_DRAFTS = 32  # rows of a sequence: fewer than a chunk of recurrent layers, and than attention takes as prefill
DRAFTING_SEQUENCES = (2, 4, 8)  # in steps with drafts


@dataclass(frozen=True, slots=True)
class Shape:
    """The most rows and sequences of a step, and rows of a sequence; with adapters, or for steps without any."""

    rows: int
    sequences: int
    width: int
    adapters: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.rows, self.sequences, self.width

    @property
    def keeps_rows(self) -> bool:
        """Whether sequences may have drafts, for which recurrent layers keep their inputs."""
        return self.width > 1

    def takes(self, rows: int, sequences: int, width: int, adapters: bool) -> bool:
        """Whether a step fits. One without adapters has graphs that compute none."""
        return rows <= self.rows and sequences <= self.sequences and width <= self.width and adapters == self.adapters


def step_shapes(
    config: EngineConfig, records_attention: bool, recurrent: bool, weights_stream: bool = False
) -> list[Shape]:
    """The shapes that have graphs, from the smallest on.

    records_attention: else it runs between graphs, which then take any number of rows of a sequence, unless a network
    is recurrent.
    """
    any_width = not records_attention and not recurrent
    rows = config.max_num_seqs + (config.num_speculative_tokens if any_width else 0)
    is_whole = records_attention and not weights_stream
    most = min(rows, config.max_num_batched_tokens, LARGEST if is_whole else LARGEST_BETWEEN)
    shapes = [Shape(size, size, size if any_width else 1) for size in batch_sizes(most, halves=is_whole)]
    if not any_width:
        shapes += _with_drafts(config, LARGEST_BETWEEN if weights_stream else LARGEST)
    if config.enable_lora:
        shapes += [replace(shape, adapters=True) for shape in shapes]
    return sorted(set(shapes), key=lambda shape: (*shape.sizes, shape.adapters))


def batch_sizes(most: int, halves: bool) -> list[int]:
    """1, 2, 4 and so on, with `halves` from 16 on the middle of two powers too, and `most`: at most 16 of them.

    Steps take the next larger one: a padded row takes no attention, and few rows are multiplied as fast as more.
    """
    powers = [2**power for power in range(most.bit_length())]
    between = [3 * power // 2 for power in powers if power >= 16] if halves else []
    return sorted({size for size in (*powers, *between) if size < most} | {most})


def _with_drafts(config: EngineConfig, largest: int) -> Iterator[Shape]:
    """Of steps in which sequences have drafts, whose number is bounded as in `Scheduler._draft`."""
    drafts = config.num_speculative_tokens
    if not drafts:
        return
    most = min(config.max_num_seqs + drafts, config.max_num_batched_tokens, largest)
    alone = min(1 + drafts, most, MOST_WITH_DRAFTS)
    yield from (Shape(rows, 1, rows) for rows in {*range(2, min(alone, MOST_ALONE) + 1), alone} if rows > 1)
    for sequences in DRAFTING_SEQUENCES:
        if sequences <= config.max_num_seqs and sequences < most:
            yield Shape(min(sequences * alone, most), sequences, alone)
