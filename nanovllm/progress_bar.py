"""What a person sees while prompts run: how many are done, how fast, and how far long prefills are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from tqdm import tqdm

from nanovllm.engine.metrics import Progress
from nanovllm.outputs import RequestOutput

REDRAW = 0.1  # seconds
LONG_PROMPT = 2048  # tokens: shorter prefills come and go too fast to be read


class ProgressBar:
    """A tqdm bar over prompts with input and output tokens per second; use it as a context."""

    def __init__(self, num_prompts: int, shown: bool) -> None:
        self._bar = tqdm(total=num_prompts, desc="Processed prompts", disable=not shown)
        self._start = time.monotonic()
        self._last = 0.0
        self._read = self._written = 0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, finished: Iterable[RequestOutput], progress: Callable[[], Progress]) -> None:
        """A step is over and has finished these; `progress` is asked only when the bar is drawn."""
        if self._bar.disable:
            return
        ended = list(finished)
        self._read += sum(len(output.prompt_token_ids) for output in ended)
        self._written += sum(len(completion.token_ids) for output in ended for completion in output.outputs)
        self._bar.update(len(ended))
        now = time.monotonic()
        if ended or now - self._last >= REDRAW:
            self._last = now
            self._bar.set_postfix_str(self._line(progress(), now - self._start))

    def _line(self, running: Progress, seconds: float) -> str:
        """Such as `input 980.1 tok/s, output 31.0 tok/s, prefill 45% of 32,768 tokens`."""
        read, written = self._read + running.computed_tokens, self._written + running.output_tokens
        seconds = max(seconds, 1e-9)
        line = f"input {read / seconds:.1f} tok/s, output {written / seconds:.1f} tok/s"
        if running.prompt_tokens >= LONG_PROMPT:
            share = running.prompt_tokens_done / running.prompt_tokens
            line += f", prefill {share:.0%} of {running.prompt_tokens:,} tokens"
        return line
