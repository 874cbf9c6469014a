"""Progress displays: the progress bar of `LLM.generate`, and what the command line's displays share with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from tqdm import tqdm

from nanovllm.engine.metrics import Progress
from nanovllm.outputs import RequestOutput

REDRAW = 0.1  # seconds
LONG_PROMPT = 2048  # tokens; the prefill of shorter prompts is too fast to display


class TokenRates:
    """Input and output tokens per second since it was created. `num_input`, `num_output`: of finished requests."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self.num_input = self.num_output = 0

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    def with_running(self, running: Progress) -> tuple[float, float]:
        """The rates, including the tokens of running requests."""
        seconds = self.seconds
        return (self.num_input + running.computed_tokens) / seconds, (self.num_output + running.output_tokens) / seconds


def prefill_share(running: Progress) -> str | None:
    """Such as `prefill 45% of 32,768 tokens`; None while only short prompts are computed."""
    if running.prompt_tokens < LONG_PROMPT:
        return None
    return f"prefill {running.prompt_tokens_done / running.prompt_tokens:.0%} of {running.prompt_tokens:,} tokens"


class ProgressBar:
    """A tqdm bar over prompts with input and output tokens per second, as a context manager."""

    def __init__(self, num_prompts: int, shown: bool) -> None:
        self._bar = tqdm(total=num_prompts, desc="Processed prompts", disable=not shown)
        self._rates = TokenRates()
        self._last_drawn = 0.0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, finished: Iterable[RequestOutput], progress: Callable[[], Progress]) -> None:
        """Count the requests that a step has finished. `progress` is called only if the bar is redrawn."""
        if self._bar.disable:
            return
        outputs = list(finished)
        self._rates.num_input += sum(len(output.prompt_token_ids) for output in outputs)
        self._rates.num_output += sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        self._bar.update(len(outputs))
        now = time.monotonic()
        if outputs or now - self._last_drawn >= REDRAW:
            self._last_drawn = now
            self._bar.set_postfix_str(self._line(progress()))

    def _line(self, running: Progress) -> str:
        """Such as `input 980.1 tok/s, output 31.0 tok/s, prefill 45% of 32,768 tokens`."""
        read, written = self._rates.with_running(running)
        prefill = prefill_share(running)
        return f"input {read:.1f} tok/s, output {written:.1f} tok/s" + (f", {prefill}" if prefill else "")
