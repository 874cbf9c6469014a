"""Progress on standard error: how far running requests are, for `LLM.generate` and the command line.

`StatusLine` is the line, `Meter` says what it tells, and `ProgressDisplay` refreshes it before every layer of a step.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from nanovllm.data.progress import Progress, WatchSteps
from nanovllm.outputs import RequestOutput

REDRAW = 0.1  # seconds, on a terminal
REPRINT = 1.0  # seconds, elsewhere
TICK = 0.5  # seconds after which a terminal shows the time anew
DELAY = 0.5  # seconds; shorter work shows no progress
ERASE = "\r\x1b[K"


def no_clock() -> str:
    return ""


class StatusLine:
    """A line about work in progress. On a terminal it is redrawn in place, and its clock goes on between two updates.

    Elsewhere a new line is printed, at most one in a second and none that says the same as the one before.
    shown: whether to show anything; None means only on a terminal.
    """

    def __init__(self, shown: bool | None = None) -> None:
        self._in_place = sys.stderr is not None and sys.stderr.isatty()
        self.shown = sys.stderr is not None and (self._in_place if shown is None else shown)
        self._last_time = -REPRINT
        self._last_state = ""
        self._drawn: tuple[str, Callable[[], str]] | None = None  # what the terminal shows
        self._lock = threading.Lock()  # of the two above, and of the terminal
        self._ended = threading.Event()
        self._ticker: threading.Thread | None = None

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
        self._ended.set()
        if self._ticker is not None:
            self._ticker.join()

    def is_due(self) -> bool:
        """Whether enough time has passed to show something new."""
        return self.shown and time.monotonic() - self._last_time >= (REDRAW if self._in_place else REPRINT)

    def show(self, state: str, clock: Callable[[], str] = no_clock) -> None:
        """Show a new state of the work, followed by what `clock` says at the time."""
        if not self.shown:
            return
        if self._in_place:
            with self._lock:
                self._drawn = (state, clock)
                self._draw()
            self._tick()
        elif self.is_due() and state != self._last_state:
            self.write(f"{state}{clock()}\n")
        else:
            return
        self._last_time, self._last_state = time.monotonic(), state

    def clear(self) -> None:
        """Erase the line before other output to the same terminal. It stays away until the next `show`."""
        with self._lock:
            if self._drawn is not None:
                self.write(ERASE)
            self._drawn = None

    @contextmanager
    def during(self, state: str) -> Iterator[None]:
        """Show the state, and how long it has lasted."""
        start = time.monotonic()
        self.show(state, lambda: f", {duration(time.monotonic() - start)}" if self._in_place else "")
        try:
            yield
        finally:
            self.clear()

    def _draw(self) -> None:
        if self._drawn is not None:
            state, clock = self._drawn
            self.write(f"{ERASE}{f'{state}{clock()}'[: _columns() - 1]}")

    def _tick(self) -> None:
        if self._ticker is None:
            self._ticker = threading.Thread(target=self._redraw, name="progress", daemon=True)
            self._ticker.start()

    def _redraw(self) -> None:
        while not self._ended.wait(TICK):
            with self._lock:
                self._draw()

    def write(self, text: str) -> None:
        """Write to standard error as it is. Progress that cannot be written ends, and costs nothing else."""
        try:
            print(text, end="", file=sys.stderr, flush=True)
        except (OSError, ValueError):
            self.shown, self._drawn = False, None


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


class Meter:
    """Counts prompts and tokens from its creation on. `total`: the number of prompts, None if it is not known.

    Rates are of computed prompt tokens, up to the last look at the engine that found new ones, and of generated tokens,
    from the first look that found some.
    """

    def __init__(self, total: int | None) -> None:
        self.total = total
        self.finished = 0
        self.failed = 0
        self._start = self._now = time.monotonic()
        self._input = (self._start, 0.0)  # the last time at which there were more computed tokens, and how many
        self._output: tuple[float, float] | None = None  # the first time at which there were generated tokens
        # Of finished requests: prompt tokens, how many of them were computed, generated tokens.
        self._ended_prompts = self._ended_input = self._ended_output = 0

    def restart(self) -> None:
        """Count time from now on, since only now the work begins."""
        self._start = self._now = time.monotonic()
        self._input = (self._start, self._input[1])

    def count(self, output: RequestOutput) -> None:
        """Count the tokens of an output that is final, or holds only what is new."""
        prompt, computed = len(output.prompt_token_ids), output.metrics.prefill_tokens
        generated = sum(len(completion.token_ids) for completion in output.outputs)
        self.count_tokens(*((prompt, computed) if output.finished else (0, 0)), generated)

    def count_tokens(self, prompt: int, computed: int, generated: int) -> None:
        """Count tokens of finished prompts, how many of these were computed, and generated tokens."""
        self._ended_prompts += prompt
        self._ended_input += computed
        self._ended_output += generated

    @property
    def num_tokens(self) -> int:
        """Tokens of finished requests, of prompts and generated."""
        return self._ended_prompts + self._ended_output

    def state(self, running: Progress) -> str:
        """Such as `3 of 10 prompts, prefill 14,746 of 32,768 tokens (45%), 980.1 tok/s in, 31.0 tok/s out`."""
        self._now = time.monotonic()
        parts = [] if self.total == 1 else [f"{of(self.finished + self.failed, self.total)} prompts"]
        done, tokens = self._prefill(running)
        if done < tokens:
            parts.append(f"prefill {int(done):,} of {tokens:,} tokens ({100 * int(done) // tokens}%)")
        return ", ".join([*parts, *self._rates(running)])

    def clock(self, running: Progress) -> Callable[[], str]:
        """Says how long the work has lasted, and about how long it will still take."""
        now = time.monotonic()
        left = self._seconds_left(running, now - self._start)

        def say() -> str:
            later = time.monotonic()
            rest = "" if left is None else f", about {duration(max(0.0, now + left - later))} left"
            return f", {duration(later - self._start)}{rest}"

        return say

    def summary(self) -> str:
        """The totals, at the end."""
        self._now, seconds = time.monotonic(), time.monotonic() - self._start
        tokens = f"{self._ended_input:,} tokens computed, {self._ended_output:,} generated"
        self._output = self._output or (self._start, 0.0)
        rates = "".join(f", {rate}" for rate in self._rates(Progress()))
        return f"{self.finished:,} prompt{'s' * (self.finished != 1)}, {tokens} in {seconds:,.1f} s{rates}"

    def _prefill(self, running: Progress) -> tuple[float, int]:
        """Prompt tokens done of all, of the prompts seen so far."""
        before = self._ended_prompts + running.prefilled_tokens
        return before + running.prompt_tokens_done, before + running.prompt_tokens + running.waiting_tokens

    def _seconds_left(self, running: Progress, seconds: float) -> float | None:
        """At the average speed so far: of all prompts if some have finished, else of the prefill.

        A running prompt counts by its generated tokens, as if it had as many in all as the finished ones on average.
        """
        ended = self.finished + self.failed
        if self.total is not None and ended:
            average = self._ended_output / ended
            done = ended + (min(running.output_tokens / average, running.num_requests) if average else 0.0)
            return seconds / done * (self.total - done) if done < self.total else None
        done, tokens = self._prefill(running)
        computed = self._ended_input + running.computed_tokens
        return seconds * (tokens - done) / computed if computed and done < tokens else None

    def _rates(self, running: Progress) -> list[str]:
        read, written = self._ended_input + running.computed_tokens, self._ended_output + running.output_tokens
        if read > self._input[1]:
            self._input = (self._now, read)
        if written and self._output is None:
            self._output = (self._now, written)
        rates = []
        if read:
            rates.append(f"{read / max(self._input[0] - self._start, 1e-9):,.1f} tok/s in")
        begin, before = self._output or (self._now, written)
        if written > before:
            rates.append(f"{(written - before) / max(self._now - begin, 1e-9):,.1f} tok/s out")
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
        self.meter = meter
        self.has_shown = False
        self.is_held = False  # whether other text is on the terminal's line
        self._line, self._progress, self._watch_steps, self._prefix = line, progress, watch_steps, prefix
        self._begin = time.monotonic() + DELAY
        self._others: Callable[[float], None] | None = None

    def __enter__(self) -> ProgressDisplay:
        if self._line.shown:
            self._others = self._watch_steps(self._on_layer)
        return self

    def __exit__(self, *_: object) -> None:
        if self._line.shown:
            self._watch_steps(self._others)
        self._line.clear()

    def refresh(self, step_share: float = 0.0) -> None:
        """Show the state if it is time to."""
        if self._line.is_due() and not self.is_held and time.monotonic() >= self._begin:
            running = self._progress(step_share)
            self.has_shown = True
            self._line.show(self._prefix + self.meter.state(running), self.meter.clock(running))

    def _on_layer(self, step_share: float) -> None:
        if self._others is not None:
            self._others(step_share)
        self.refresh(step_share)


class ProgressBar:
    """The display of `LLM.generate`, which ends with a line of totals if it has shown anything."""

    def __init__(self, num_prompts: int, progress: Callable[[float], Progress], watch_steps: WatchSteps) -> None:
        self._line = StatusLine(shown=True)
        self._display = ProgressDisplay(self._line, Meter(num_prompts), progress, watch_steps)

    def __enter__(self) -> ProgressBar:
        self._display.__enter__()
        return self

    def __exit__(self, error: object = None, *_: object) -> None:
        self._display.__exit__()
        if self._display.has_shown and error is None:
            self._line.write(f"{self._display.meter.summary()}\n")
        self._line.__exit__()

    def update(self, outputs: Iterable[RequestOutput]) -> None:
        """Count the requests that a step has finished."""
        for output in outputs:
            self._display.meter.count(output)
            self._display.meter.finished += output.finished
        self._display.refresh()


def of(done: int, total: int | None) -> str:
    """`3 of 10`, or `3` if the total is not known."""
    return f"{done:,}" if total is None else f"{done:,} of {total:,}"


def duration(seconds: float) -> str:
    """Such as `0:42` or `1:02:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
