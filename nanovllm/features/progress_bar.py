"""Progress of prompts: a bar of tqdm, with what was computed and moved in its postfix."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from nanovllm.outputs import RequestMetrics, RequestOutput

REDRAW = 0.25  # seconds

MakeBar = Callable[..., "tqdm[Any]"]  # tqdm, or what is called as it is


@dataclass(slots=True)
class Phase:
    """Tokens, and the seconds from when the first request began to make some to when the last one ended."""

    tokens: int = 0
    begin: float = float("inf")
    end: float = float("-inf")

    def add(self, tokens: int, begin: float | None, end: float | None) -> None:
        """Add the tokens of a request; without times it made none."""
        if tokens and begin is not None and end is not None:
            self.tokens += tokens
            self.begin = min(self.begin, begin)
            self.end = max(self.end, end)


@dataclass(slots=True)
class Meter:
    """Counts of a run, from its creation on. Tokens are those of finished requests."""

    finished: int = 0  # prompts
    failed: int = 0  # prompts
    computed: int = 0  # tokens of prompts
    cached: int = 0  # tokens of prompts, found in the prefix cache
    recomputed: int = 0  # tokens of prompts, computed although an earlier prompt began with them
    generated: int = 0
    drafted: int = 0  # tokens guessed by speculative decoding
    accepted: int = 0  # of these
    prefill: Phase = field(default_factory=Phase)
    decode: Phase = field(default_factory=Phase)
    start: float = field(default_factory=time.monotonic)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and generated ones."""
        return self.computed + self.cached + self.generated

    def count(self, output: RequestOutput) -> None:
        """Count the tokens of an output that is final, or holds only what is new."""
        self.generated += sum(len(completion.token_ids) for completion in output.outputs)
        if output.finished:
            self.count_request(output.metrics)

    def count_request(self, metrics: RequestMetrics) -> None:
        """Count a request that has finished, without its generated tokens."""
        self.computed += metrics.prefill_tokens
        self.cached += metrics.cached_tokens
        self.recomputed += metrics.recomputed_tokens
        self.drafted += metrics.drafted_tokens
        self.accepted += metrics.accepted_tokens
        self.prefill.add(metrics.first_prefill_tokens, metrics.first_scheduled_time, metrics.first_token_time)
        self.decode.add(metrics.decode_tokens, metrics.first_token_time, metrics.finished_time)

    def summary(self) -> str:
        """Such as `2 prompts, 900 tokens computed, 20 generated in 1.5 s, 812.3 tok/s in, 19.4 tok/s out`."""
        computed = f"{self.computed:,} tokens computed{again(self.recomputed)}"
        parts = [f"{self.finished:,} prompt{'s' * (self.finished != 1)}", computed]
        if self.cached:
            parts.append(f"{self.cached:,} found in the prefix cache")
        parts.append(f"{self.generated:,} generated in {time.monotonic() - self.start:,.1f} s")
        for phase, way in ((self.prefill, "in"), (self.decode, "out")):
            if phase.end > phase.begin:
                parts.append(f"{phase.tokens / (phase.end - phase.begin):,.1f} tok/s {way}")
        if self.drafted:
            parts.append(drafts(self.drafted, self.accepted))
        return ", ".join(parts)


class ProgressBar:
    """A bar over prompts. While it is entered, it is drawn anew before the layers of a step, too.

    make: makes the bar; None shows none. total: the number of prompts, None if it is not known. llm: the LLM that runs
    them; None if it is in other processes.
    """

    def __init__(self, make: MakeBar | None, total: int | None, meter: Meter, llm: Any) -> None:
        self._make = make
        self._total = total
        self._meter = meter
        self._llm = llm
        self._bar: tqdm[Any] | None = None
        self._is_held = False  # whether other text is on the terminal's line
        self._others: Callable[[float], None] | None = None  # what watched the steps before
        self._next = 0.0  # when it is drawn again

    def __enter__(self) -> ProgressBar:
        if self._make is not None and sys.stderr is not None:
            self._bar = self._make(total=self._total, desc="Processed prompts", dynamic_ncols=True)
            if self._llm is not None:
                self._others = self._llm.watch_steps(self._on_layer)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            if self._llm is not None:
                self._llm.watch_steps(self._others)
            self._next = 0.0
            self.refresh()
            self._bar.close()

    def update(self, outputs: Iterable[RequestOutput]) -> None:
        """Count what a step has computed and finished, and show it."""
        for output in outputs:
            self._meter.count(output)
            self._meter.finished += output.finished
        self.refresh()

    def refresh(self, step_share: float = 0.0) -> None:
        """Draw the bar if it is time to. step_share: how much of the current step is done."""
        if self._bar is None or self._is_held or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + REDRAW
        self._bar.set_postfix_str(self._postfix(step_share), refresh=False)
        self._bar.n = self._meter.finished + self._meter.failed
        self._bar.refresh()

    def hold(self, is_held: bool = True) -> None:
        """Take the bar off the terminal, since other text begins there; False when that line has ended."""
        if self._bar is not None and is_held and not self._is_held:
            self._bar.clear()
        self._is_held = is_held

    def _on_layer(self, step_share: float) -> None:
        if self._others is not None:
            self._others(step_share)
        self.refresh(step_share)

    def _postfix(self, step_share: float) -> str:
        """Such as `prefill 45% of 32,768 tokens, 0:18 left, 980.1 tok/s in, 0.0 tok/s out, 113 MB to the device`.

        Rates are those since the start of the run, as in vLLM.
        """
        meter = self._meter
        if self._llm is None:
            return f"{meter.generated:,} tokens generated"
        running = self._llm.engine.progress(step_share)
        moved = self._llm.kv_stats().transfers
        seconds = time.monotonic() - meter.start
        rate = (meter.computed + running.computed_tokens) / seconds
        parts = []
        if running.prompt_tokens:
            share = running.prompt_tokens_done / running.prompt_tokens
            parts.append(f"prefill {share:.0%} of {running.prompt_tokens:,} tokens")
            if rate:
                left = (running.prompt_tokens - running.prompt_tokens_done) / rate
                parts.append(f"{tqdm.format_interval(int(left))} left")
        parts.append(f"{rate:,.1f} tok/s in")
        parts.append(f"{(meter.generated + running.output_tokens) / seconds:,.1f} tok/s out")
        if moved.h2d_bytes:
            parts.append(f"{size(moved.h2d_bytes)} to the device")
        if moved.d2h_bytes:
            parts.append(f"{size(moved.d2h_bytes)} to the host")
        return ", ".join(parts)


def again(recomputed: int) -> str:
    """Such as ` (300 of them again)`: tokens that an earlier prompt began with; nothing for 0."""
    return f" ({recomputed:,} of them again)" if recomputed else ""


def drafts(drafted: int, accepted: int) -> str:
    """Such as `24 of 31 drafts accepted`: tokens of speculative decoding."""
    return f"{accepted:,} of {drafted:,} drafts accepted"


def size(num_bytes: int) -> str:
    """Such as `29.5 MB`, `113 MB` or `6.8 GB`."""
    value, unit = (num_bytes / 1e9, "GB") if num_bytes >= 1e9 else (num_bytes / 1e6, "MB")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"


def of(done: int, total: int | None) -> str:
    """`3 of 10`, or `3` if the total is not known."""
    return f"{done:,}" if total is None else f"{done:,} of {total:,}"
