"""One line on standard error that says what is going on."""

from __future__ import annotations

import shutil
import sys
import time

from nanovllm.cli.boundary import say
from nanovllm.engine.metrics import Progress
from nanovllm.outputs import RequestOutput
from nanovllm.progress_bar import TokenRates, prefill_share

REDRAW = 0.1  # seconds, on a terminal
REPRINT = 2.0  # seconds, elsewhere


class StatusLine:
    """A status line, redrawn on a terminal and printed anew elsewhere.

    shown: whether to show anything; None means only on a terminal.
    """

    def __init__(self, shown: bool | None) -> None:
        self._in_place = sys.stderr.isatty()
        self.shown = self._in_place if shown is None else shown
        self._last = -REPRINT
        self._drawn = False

    def is_due(self) -> bool:
        """Whether enough time has passed to show something new."""
        return self.shown and time.monotonic() - self._last >= (REDRAW if self._in_place else REPRINT)

    def show(self, text: str) -> None:
        """Replace the line, whether it is due or not."""
        if not self.shown:
            return
        self._last = time.monotonic()
        if self._in_place:
            width = shutil.get_terminal_size().columns - 1
            say(f"\r\x1b[K{text[:width]}", end="")
        else:
            say(text)
        self._drawn = True

    def clear(self) -> None:
        """Erase the line before other output to the same terminal."""
        if self._drawn and self._in_place:
            say("\r\x1b[K", end="")
        self._drawn = False


class Meter:
    """Counts finished prompts and their tokens. `total`: the number of prompts, None if it is not known."""

    def __init__(self, total: int | None) -> None:
        self.total = total
        self.finished = 0
        self.failed = 0
        self._rates = TokenRates()

    def count(self, output: RequestOutput) -> None:
        """Count the tokens of an output that is final, or holds only what is new."""
        self._rates.num_output += sum(len(completion.token_ids) for completion in output.outputs)
        if output.finished:
            self._rates.num_input += output.metrics.prefill_tokens

    def line(self, running: Progress) -> str:
        """Such as `3 of 10 prompts, 7 running, prefill 45% of 32,768 tokens, 980.1 tok/s in, 31.0 tok/s out`."""
        prefill = prefill_share(running)
        parts = [f"{of(self.finished + self.failed, self.total)} prompts", f"{running.num_requests} running"]
        return ", ".join([*parts, *([prefill] if prefill else []), self._rates_text(running)])

    def summary(self) -> str:
        """The totals, at the end."""
        rates = self._rates
        tokens = f"{rates.num_input:,} tokens computed, {rates.num_output:,} generated"
        return f"{self.finished:,} prompts, {tokens} in {rates.seconds:,.1f} s: {self._rates_text(Progress())}"

    def _rates_text(self, running: Progress) -> str:
        read, written = self._rates.with_running(running)
        return f"{read:,.1f} tok/s in, {written:,.1f} tok/s out"


def of(done: int, total: int | None) -> str:
    """`3 of 10`, or `3` if the total is not known."""
    return f"{done:,}" if total is None else f"{done:,} of {total:,}"
