"""What drafters of tests have in common: they check what they are told, and measure nothing. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm.engine.request import Sequence as Running


class CheckedDrafter:
    """Implements `features.speculation.hook.Drafter` but for `draft`."""

    accepted = 0  # drafts so far

    def begin_step(self, wanted: Sequence[tuple[Running, int]], most: int, rows: int, tokens: int) -> None:
        assert all(most > 0 and seq.num_output_tokens > 0 for seq, most in wanted)

    def computed(self, seq: Running, begin: int, end: int) -> None:
        assert 0 <= begin <= end

    def verified(self, seq: Running, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted
        self.accepted += accepted

    def measured(self, rows: int, seconds: float) -> None:
        assert rows > 0 and seconds >= 0

    def close(self) -> None:
        return
