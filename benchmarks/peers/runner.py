"""Shared by the runners of all engines: load, warm up, generate once with timing, print one JSON line.

Runs in the engine's environment, so it only uses the standard library. A runner module has a function that loads the
engine and calls `run` with it. Only the runner modules depend on an engine.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Emit = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt for one process. Lengths in tokens."""

    model: str  # directory in Hugging Face format, or a GGUF file
    gguf: str | None  # the same weights for llama.cpp
    prompt: list[int]
    warmup: list[int]  # other tokens, so that no cache helps the prompt
    output_len: int
    dtype: str  # of the weights in `model`
    threads: int
    kv_bytes: int  # of the complete sequence

    @property
    def max_len(self) -> int:
        return len(self.prompt) + self.output_len


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded engine. `generate` runs one prompt greedily for a number of tokens, past any end-of-sequence token.

    It calls `emit` with each token as soon as it is known.
    """

    version: str
    settings: dict[str, Any]  # that differ from the engine's defaults
    generate: Callable[[list[int], int, Emit], None]


def run(load: Callable[[Job], Loaded]) -> None:
    """The main function of a runner. The job's file is the only argument, the result the only line on stdout."""
    result_file = os.fdopen(os.dup(1), "w")  # not inherited by processes that the engine starts
    os.dup2(2, 1)  # engines also print to stdout
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    start = time.perf_counter()
    loaded = load(job)
    load_s = time.perf_counter() - start
    warmup_len = min(8, job.output_len)
    timed_tokens(loaded, job.warmup, warmup_len)
    tokens, times = timed_tokens(loaded, job.prompt, job.output_len)
    result = {
        "version": loaded.version,
        "settings": loaded.settings,
        "load_s": load_s,
        "prefill_s": times[0],
        "tpot_s": (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
        "tokens": tokens,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    print(json.dumps(result), file=result_file, flush=True)


def timed_tokens(loaded: Loaded, prompt: list[int], output_len: int) -> tuple[list[int], list[float]]:
    """The tokens, and the time of each in seconds after the prompt was passed."""
    tokens: list[int] = []
    times: list[float] = []

    def emit(token: int) -> None:
        times.append(time.perf_counter() - start)
        tokens.append(token)

    start = time.perf_counter()
    loaded.generate(prompt, output_len, emit)
    if len(tokens) != output_len:
        raise RuntimeError(f"the engine generated {len(tokens)} tokens, not {output_len}")
    return tokens, times


def peak_rss_bytes() -> int:
    """Sum of the peak resident memory of this process and its children.

    Pages of files, such as libraries, count only for the largest process, since the others map the same ones.
    """
    parents = {path.name: _status(path, "PPid") for path in Path("/proc").iterdir() if path.name.isdecimal()}
    family = {str(os.getpid())}
    while grown := {pid for pid, parent in parents.items() if str(parent) in family} - family:
        family |= grown
    processes = sorted((Path("/proc") / pid for pid in family), key=lambda process: _status(process, "VmHWM"))
    others = sum(max(0, _status(process, "VmHWM") - _status(process, "RssFile")) for process in processes[:-1])
    return (others + _status(processes[-1], "VmHWM")) * 1024


def _status(process: Path, name: str) -> int:
    """A number of /proc/PID/status; 0 if the process has exited or has no such line."""
    try:
        match = re.search(rf"^{name}:\s+(\d+)", (process / "status").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return int(match.group(1)) if match else 0
