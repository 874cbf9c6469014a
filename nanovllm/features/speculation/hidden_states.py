"""The hidden states that a head for multi-token prediction reads, from the model's steps to the head's passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nanovllm.data.batch import ScheduledSequence
from nanovllm.device import Device
from nanovllm.kvcache.forward_pass import ComputedRows, PassHook
from nanovllm.layers.forward_context import ForwardContext


@dataclass(slots=True)
class HeldRows:
    """Rows of one sequence that the head has not read."""

    begin: int  # position of the first row
    rows: list[Tensor] = field(default_factory=list)  # [tokens, hidden] each, one after the other
    first: int = 0  # the position that the head counts as its first one
    drafted: Tensor | None = None  # [1, hidden]: the head's own row, which it reads for its next draft

    @property
    def end(self) -> int:
        return self.begin + sum(len(rows) for rows in self.rows)


class HiddenStates:
    """Holds rows by sequence and position, until the head has read them; the drafter says whose rows stay.

    The runners of the model and of the head have the hooks `of_model` and `of_head`.
    """

    def __init__(self) -> None:
        self._step: dict[int, tuple[int, Tensor]] = {}  # of the last step: position of the first row, and the rows
        self._held: dict[int, HeldRows] = {}
        self._added: list[HeldRows] = []  # whose last rows are still those of the step

    def of_model(self) -> PassHook:
        """The hook of the model's runner, which keeps what it computes."""
        return _ModelRows(self)

    def of_head(self) -> PassHook:
        """The hook of the head's runner, which reads that, and keeps what the head computes after drafts."""
        return _HeadRows(self)

    # ---- the model's steps

    def keep(self, rows: ComputedRows) -> None:
        """The rows of a pass, which `add` can take until `end_step`."""
        for seq, part, skipped in _parts(rows):
            self._step[seq.seq_id] = seq.context_len + skipped, part

    def add(self, seq_id: int, begin: int, end: int) -> bool:
        """Hold the rows of these positions, as far as the last step has them. True if others lack before them: then
        the rows held so far are dropped.
        """
        at, part = self._step.get(seq_id, (end, None))
        held = self._held.get(seq_id)
        begin = max(begin, at)
        if part is None or begin >= end:
            return False
        is_gap = held is not None and begin > held.end
        if held is None or is_gap:
            held = self._held[seq_id] = HeldRows(begin)
        if held.end < end:
            held.rows.append(part[held.end - at : end - at])
            self._added.append(held)
        return is_gap

    def end_step(self, device: Device) -> None:
        """Copy the rows that were added: the step's tensors have the rows of others too."""
        if self._added:
            with device.compute():
                for held in self._added:
                    held.rows[-1] = held.rows[-1].clone()
        self._step = {}
        self._added = []

    # ---- what the head has to read

    def held(self, seq_id: int) -> range:
        """The positions of the rows that are held; it ends where the next ones must begin."""
        held = self._held.get(seq_id)
        return range(0) if held is None else range(held.begin, held.end)

    def count_from(self, seq_id: int, first: int) -> None:
        """The head counts positions from this one on."""
        self._held[seq_id].first = first

    def skip(self, seq_id: int, count: int) -> None:
        """The head does not need its first `count` positions any more."""
        held = self._held[seq_id]
        left = min(held.first + count, held.end) - held.begin
        while left > 0:
            rows = held.rows.pop(0)
            if len(rows) > left:
                held.rows.insert(0, rows[left:])
            held.begin += min(left, len(rows))
            left -= len(rows)

    def drop(self, seq_id: int) -> None:
        self._held.pop(seq_id, None)

    def clear(self) -> None:
        self._step = {}
        self._held = {}
        self._added = []

    # ---- the head's passes

    def of_step(self, sequences: Sequence[ScheduledSequence]) -> Tensor:
        """The hidden states for the tokens of a batch of the head: [tokens, hidden]."""
        return torch.cat([self._rows(seq) for seq in sequences])

    def _rows(self, seq: ScheduledSequence) -> Tensor:
        held = self._held[seq.seq_id]
        if held.first + seq.context_len >= held.end:  # after a draft
            assert held.drafted is not None and len(seq.token_ids) == 1
            return held.drafted
        self.skip(seq.seq_id, seq.context_len)
        return torch.cat(held.rows)[: len(seq.token_ids)]

    def keep_drafted(self, rows: ComputedRows) -> None:
        """The rows of a pass of the head: the last of each sequence is read for its next draft."""
        for seq, part, _ in _parts(rows):
            self._held[seq.seq_id].drafted = part[-1:].clone()


class _ModelRows(PassHook):
    def __init__(self, hidden: HiddenStates) -> None:
        self._hidden = hidden

    def computed(self, rows: ComputedRows) -> None:
        self._hidden.keep(rows)


class _HeadRows(PassHook):
    def __init__(self, hidden: HiddenStates) -> None:
        self._hidden = hidden

    def extended(self, context: ForwardContext, rows: Sequence[tuple[ScheduledSequence, int]]) -> ForwardContext:
        return replace(context, hidden=self._hidden.of_step([seq for seq, _ in rows]))

    def computed(self, rows: ComputedRows) -> None:
        self._hidden.keep_drafted(rows)


def _parts(rows: ComputedRows) -> Iterator[tuple[ScheduledSequence, Tensor, int]]:
    """Each sequence, its rows, and how many of its tokens come before them."""
    for seq, start in zip(rows.sequences, rows.starts, strict=True):
        skipped = max(0, -start)
        yield seq, rows.hidden[start + skipped : start + len(seq.token_ids)], skipped
