"""Progress on standard error: how far running requests are, for `LLM.generate` and the command line.

`StatusLine` is the line, `Meter` says what it tells, and `ProgressDisplay` refreshes it before every layer of a step.
"""

from __future__ import annotations

import os
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from nanovllm.data.progress import Progress, WatchSteps
from nanovllm.outputs import RequestMetrics, RequestOutput

REDRAW = 0.1  # seconds, on a terminal
REPRINT = 1.0  # seconds, elsewhere
DELAY = 0.5  # seconds; shorter work shows no progress
ERASE = "\r\x1b[K"


class StatusLine:
    """A line about work in progress: redrawn in place on a terminal, elsewhere a new line, at most one in a second.

    shown: whether to show anything; None means only on a terminal.
    """

    def __init__(self, shown: bool | None = None) -> None:
        self._in_place = sys.stderr is not None and sys.stderr.isatty()
        self.shown = sys.stderr is not None and (self._in_place if shown is None else shown)
        self._last_time = -REPRINT
        self._text = ""  # on the terminal's line, or printed last

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def is_due(self) -> bool:
        """Whether enough time has passed to show something new."""
        return self.shown and time.monotonic() - self._last_time >= (REDRAW if self._in_place else REPRINT)

    def show(self, text: str) -> None:
        """Show a new state of the work."""
        if self.shown and self._in_place:
            self.write(f"{ERASE}{text[: _columns() - 1]}")
        elif self.is_due() and text != self._text:
            self.write(f"{text}\n")
        else:
            return
        self._last_time = time.monotonic()
        self._text = text

    def clear(self) -> None:
        """Erase the line before other output to the same terminal. It stays away until the next `show`."""
        if self._in_place and self._text:
            self.write(ERASE)
            self._text = ""

    @contextmanager
    def during(self, text: str) -> Iterator[None]:
        """Show the text until the end of the context."""
        self.show(text)
        try:
            yield
        finally:
            self.clear()

    def write(self, text: str) -> None:
        """Write to standard error as it is. Progress that cannot be written ends, and costs nothing else."""
        try:
            print(text, end="", file=sys.stderr, flush=True)
        except (OSError, ValueError):
            self.shown = False


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def drafts(drafted: int, accepted: int) -> str:
    """Such as `24 of 31 drafts accepted`: tokens of speculative decoding."""
    return f"{accepted:,} of {drafted:,} drafts accepted"


class Spans:
    """The time that one or several of some spans of time cover."""

    def __init__(self) -> None:
        self._apart: list[tuple[float, float]] = []  # their union, in order

    def add(self, begin: float | None, end: float | None) -> None:
        """Add a span; one without a begin or an end is none."""
        if begin is None or end is None:
            return
        first = bisect_left(self._apart, begin, key=lambda span: span[1])
        last = bisect_right(self._apart, end, key=lambda span: span[0])
        met = [(begin, end), *self._apart[first:last]]
        self._apart[first:last] = [(min(begin for begin, _ in met), max(end for _, end in met))]

    @property
    def seconds(self) -> float:
        return sum(end - begin for begin, end in self._apart)


class Meter:
    """Counts prompts and tokens from its creation on. `total`: the number of prompts, None if it is not known.

    While prompts run, rates are of computed prompt tokens, up to the last look at the engine that found new ones, and
    of generated tokens, from the first look that found some. At the end they are exact: of prompt tokens in the time
    in which a prompt was computed, and of the tokens after an answer's first in that in which an answer was generated.
    """

    def __init__(self, total: int | None) -> None:
        self.total = total
        self.finished = self.failed = 0
        # Of finished requests: prompt tokens, how many of them were computed, generated tokens.
        self._prompts = self._computed = self._generated = 0
        self._cached = self._drafted = self._accepted = 0  # tokens of finished requests
        self._read = self._written = 0  # tokens of finished requests that came in these spans
        self._reading = Spans()
        self._writing = Spans()
        self._input = (0.0, 0.0)  # the last time at which there were more computed tokens, and how many
        self._output: tuple[float, float] | None = None  # the first time at which there were generated tokens
        self.restart()

    def restart(self) -> None:
        """Count time from now on, since only now the work begins."""
        self._start = time.monotonic()

    def count(self, output: RequestOutput) -> None:
        """Count the tokens of an output that is final, or holds only what is new."""
        self.count_tokens(0, sum(len(completion.token_ids) for completion in output.outputs))
        if output.finished:
            self.count_tokens(len(output.prompt_token_ids), 0, output.metrics)

    def count_tokens(self, prompt: int, generated: int, metrics: RequestMetrics | None = None) -> None:
        """Count tokens of finished prompts and generated tokens. metrics: of a request that has finished."""
        self._prompts += prompt
        self._generated += generated
        if metrics is None:
            return
        self._computed += metrics.prefill_tokens
        self._cached += metrics.cached_tokens
        self._drafted += metrics.drafted_tokens
        self._accepted += metrics.accepted_tokens
        self._read += metrics.first_prefill_tokens
        self._written += metrics.decode_tokens
        self._reading.add(metrics.first_scheduled_time, metrics.first_token_time)
        self._writing.add(metrics.first_token_time, metrics.finished_time)

    @property
    def num_tokens(self) -> int:
        """Tokens of finished requests, of prompts and generated."""
        return self._prompts + self._generated

    def text(self, running: Progress) -> str:
        """Such as `3 of 10 prompts, prefill 14,746 of 32,768 tokens (45%), 980.1 tok/s in, 0:15, about 0:18 left`."""
        seconds = time.monotonic() - self._start
        ended = self.finished + self.failed
        parts = [] if self.total == 1 else [f"{of(ended, self.total)} prompts"]
        before = self._prompts + running.prefilled_tokens
        done = before + running.prompt_tokens_done
        tokens = before + running.prompt_tokens + running.waiting_tokens
        if done < tokens:
            parts.append(f"prefill {int(done):,} of {tokens:,} tokens ({100 * int(done) // tokens}%)")
        parts += [*self._rates(running, seconds), duration(seconds)]
        computed = self._computed + running.computed_tokens
        if self.total is not None and ended:  # as fast as the prompts so far
            parts.append(f"about {duration(seconds / ended * (self.total - ended))} left")
        elif computed and done < tokens:
            parts.append(f"about {duration(seconds / computed * (tokens - done))} left")
        return ", ".join(parts)

    def summary(self) -> str:
        """The totals, at the end."""
        seconds = time.monotonic() - self._start
        parts = [f"{self.finished:,} prompt{'s' * (self.finished != 1)}", f"{self._computed:,} tokens computed"]
        if self._cached:
            parts.append(f"{self._cached:,} found in the prefix cache")
        parts.append(f"{self._generated:,} generated in {seconds:,.1f} s")
        ways = (self._read, self._reading.seconds, "in"), (self._written, self._writing.seconds, "out")
        parts += [f"{tokens / taken:,.1f} tok/s {way}" for tokens, taken, way in ways if tokens and taken]
        if self._drafted:
            parts.append(drafts(self._drafted, self._accepted))
        return ", ".join(parts)

    def _rates(self, running: Progress, seconds: float) -> list[str]:
        read = self._computed + running.computed_tokens
        written = self._generated + running.output_tokens
        if read > self._input[1]:
            self._input = (seconds, read)
        if written and self._output is None:
            self._output = (seconds, written)
        rates = [f"{read / max(self._input[0], 1e-9):,.1f} tok/s in"] if read else []
        begin, before = self._output or (seconds, written)
        if written > before:
            rates.append(f"{(written - before) / max(seconds - begin, 1e-9):,.1f} tok/s out")
        if drafted := self._drafted + running.drafted_tokens:
            rates.append(drafts(drafted, self._accepted + running.accepted_tokens))
        return rates


class ProgressDisplay:
    """Shows the progress of an engine on a status line while it is entered. `progress`: as of `LLMEngine`.

    prefix: begins the line.
    """

    def __init__(
        self,
        line: StatusLine,
        meter: Meter,
        progress: Callable[[float], Progress],
        watch_steps: WatchSteps,
        prefix: str = "",
    ) -> None:
        self.is_held = False  # whether other text is on the terminal's line
        self._has_shown = self._watches = False
        self._line = line
        self._meter = meter
        self._progress = progress
        self._prefix = prefix
        self._watch_steps = watch_steps
        self._begin = time.monotonic() + DELAY
        self._others: Callable[[float], None] | None = None

    def __enter__(self) -> ProgressDisplay:
        self._watches = self._line.shown
        if self._watches:
            self._others = self._watch_steps(self._on_layer)
        return self

    def __exit__(self, *_: object) -> None:
        if self._watches:
            self._watch_steps(self._others)
        self._line.clear()

    def refresh(self, step_share: float = 0.0) -> None:
        """Show the state if it is time to."""
        if self._line.is_due() and not self.is_held and time.monotonic() >= self._begin:
            self._has_shown = True
            self._line.show(self._prefix + self._meter.text(self._progress(step_share)))

    def update(self, outputs: Iterable[RequestOutput]) -> None:
        """Count what a step has computed and finished, and show it."""
        for output in outputs:
            self._meter.count(output)
            self._meter.finished += output.finished
        self.refresh()

    def show_totals(self) -> None:
        """A line with the totals, if any progress was shown."""
        if self._has_shown:
            self._line.write(f"{self._meter.summary()}\n")

    def _on_layer(self, step_share: float) -> None:
        if self._others is not None:
            self._others(step_share)
        self.refresh(step_share)


def of(done: int, total: int | None) -> str:
    """`3 of 10`, or `3` if the total is not known."""
    return f"{done:,}" if total is None else f"{done:,} of {total:,}"


def duration(seconds: float) -> str:
    """Such as `0:42` or `1:02:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
