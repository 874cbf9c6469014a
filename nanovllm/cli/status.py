"""What is going on, in one line on standard error."""

from __future__ import annotations

import shutil
import sys
import time

from nanovllm.cli.boundary import say
from nanovllm.engine.metrics import Progress
from nanovllm.outputs import RequestOutput

REDRAW = 0.1  # seconds, on a terminal
REPRINT = 2.0  # seconds, elsewhere
LONG_PROMPT = 2048  # tokens: shorter prefills come and go too fast to be read


class StatusLine:
    """A line that is redrawn in place on a terminal, and printed again and again elsewhere; nothing unless `shown`."""

    def __init__(self, shown: bool | None) -> None:
        """None: only on a terminal."""
        self._in_place = sys.stderr.isatty()
        self.shown = self._in_place if shown is None else shown
        self._last = -REPRINT
        self._drawn = False

    def is_due(self) -> bool:
        """Whether it is time to show something new."""
        return self.shown and time.monotonic() - self._last >= (REDRAW if self._in_place else REPRINT)

    def show(self, text: str) -> None:
        """Replace what is shown."""
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
        """Make room for output to the same terminal."""
        if self._drawn and self._in_place:
            say("\r\x1b[K", end="")
        self._drawn = False


class Meter:
    """Counts what has finished, and says how fast it goes; `total` prompts, where that is known."""

    def __init__(self, total: int | None) -> None:
        self.total = total
        self.finished = 0
        self.failed = 0
        self._start = time.monotonic()
        self._computed_tokens = 0
        self._output_tokens = 0

    def count(self, output: RequestOutput) -> None:
        """Take an output in that is final, or holds what is new."""
        self._output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        if output.finished:
            self._computed_tokens += output.metrics.prefill_tokens

    def line(self, running: Progress, in_step: float = 0.0) -> str:
        """Such as `3 of 10 prompts, 7 running, prefill 45% of 32,768 tokens, 980.1 tok/s in, 31.0 tok/s out`.

        in_step: what the running step has computed so far, in tokens.
        """
        parts = [f"{of(self.finished + self.failed, self.total)} prompts", f"{running.num_requests} running"]
        if running.prompt_tokens >= LONG_PROMPT:
            parts.append(prefill_share(running, in_step))
        return ", ".join([*parts, self._rates(running)])

    def summary(self) -> str:
        """All of it, at the end."""
        seconds = time.monotonic() - self._start
        tokens = f"{self._computed_tokens:,} tokens computed, {self._output_tokens:,} generated"
        return f"{self.finished:,} prompts, {tokens} in {seconds:,.1f} s: {self._rates(Progress())}"

    def _rates(self, running: Progress) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        read = (self._computed_tokens + running.computed_tokens) / seconds
        written = (self._output_tokens + running.output_tokens) / seconds
        return f"{read:,.1f} tok/s in, {written:,.1f} tok/s out"


def prefill_share(running: Progress, in_step: float = 0.0) -> str:
    """How much of the prompts that are not computed whole is."""
    share = (running.prompt_tokens_done + in_step) / max(running.prompt_tokens, 1)
    return f"prefill {share:.0%} of {running.prompt_tokens:,} tokens"


def of(done: int, total: int | None) -> str:
    """`3 of 10`, and `3` where nobody knows."""
    return f"{done:,}" if total is None else f"{done:,} of {total:,}"
