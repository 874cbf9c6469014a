"""What a person sees of running requests: in a pseudo-terminal, and in a file."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import GREEDY, SMALL_CACHE, set_stdin
from engines import greedy
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import LLM
from nanovllm.apps.cli.main import main
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.features import progress_bar
from nanovllm.features.progress_bar import ERASE, Meter, Spans
from nanovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput

COLUMNS = 90
DOCUMENT = "All that is known. " * 40
LAYERWISE = ["--enable-cpu-offload", "--kvcache-block-size", "16", "--num-gpu-blocks", "6", "--num-cpu-blocks", "60"]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is shown, however fast it is."""
    for name in ("DELAY", "REDRAW", "REPRINT"):
        monkeypatch.setattr(progress_bar, name, 0.0)


class Terminal:
    """What was written to a pseudo-terminal."""

    def __init__(self) -> None:
        self.written = b""

    @property
    def drawn(self) -> list[str]:
        """The status lines, in the order in which they were drawn, and what was written between them."""
        return [text for text in self.written.decode().replace("\r\n", "\n").split(ERASE) if text]


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Standard error is a pseudo-terminal of COLUMNS columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    shown = Terminal()

    def read() -> None:
        while True:
            try:
                data = os.read(master, 4096)
            except OSError:  # the other side is closed
                return
            if not data:
                return
            shown.written += data

    reader = threading.Thread(target=read)
    reader.start()
    with monkeypatch.context() as patched, os.fdopen(slave, "w", encoding="utf-8") as stderr:
        patched.setattr("sys.stderr", stderr)
        yield shown
    reader.join()
    os.close(master)


def prefills(lines: list[str]) -> list[tuple[int, int]]:
    """Tokens done and tokens in all of each line that tells of a prefill."""
    found = (re.search(r"prefill ([\d,]+) of ([\d,]+) tokens", line) for line in lines)
    return [(int(f[1].replace(",", "")), int(f[2].replace(",", ""))) for f in found if f is not None]


@pytest.mark.parametrize("options", [[*SMALL_CACHE], LAYERWISE], ids=["chunk by chunk", "layer by layer"])
def test_chat_shows_the_prefill_of_a_document(
    model: str,
    options: list[str],
    tmp_path: Path,
    at_once: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "document").write_text(DOCUMENT)
    set_stdin(monkeypatch, b"What?\n")
    batches: list[Any] = []
    execute = ModelRunner.execute
    monkeypatch.setattr(ModelRunner, "execute", lambda self, batch: batches.append(batch) or execute(self, batch))
    command = ["chat", "--model", model, *options, *GREEDY, "--document", str(tmp_path / "document")]
    with terminal(monkeypatch) as shown:
        assert main([*command, "--max-num-batched-tokens", "256"]) == 0
    assert any(batch.layerwise is not None for batch in batches) == (options is LAYERWISE)
    drawn = shown.drawn
    assert drawn[0].startswith(f"loading {model}"[: COLUMNS - 1])
    document, question = (i for i, text in enumerate(drawn) if text.startswith("[") or "\n[" in text)
    assert re.fullmatch(r"[\d,]+ tokens: at most [\d.]+ MB of KV on the device.*", drawn[-1].splitlines()[-1])
    seen = prefills(drawn[:document])
    assert seen == sorted(seen) and seen[0][0] == 0 and {tokens for _, tokens in seen} == {seen[0][1]}
    assert seen[0][1] > 700 and len({done for done, _ in seen}) >= 6, "also within a step"
    for line in (line for line in drawn[:document] if not line.startswith("loading ")):
        assert len(line) < COLUMNS and "\n" not in line
        if not line.startswith("prefill 0 "):
            rate = re.search(r"\), ([\d,.]+) tok/s in, [\d:]+, about [\d:]+ left", line)
            assert rate is not None and float(rate[1].replace(",", "")) > 0, line
    assert prefills(drawn[document:question]) != [], "the question is a prefill too"
    assert re.fullmatch(r"\[document: 0 tokens cached, \d+ computed in [\d.]+ s\]\n", drawn[document])
    assert capsys.readouterr().out != ""


def finished(**times: Any) -> RequestOutput:
    """The output of a request of 100 prompt tokens and 23 generated ones."""
    metrics = RequestMetrics(0.0, **{"prefill_tokens": 100, "first_prefill_tokens": 100, "decode_tokens": 22} | times)
    completion = CompletionOutput(0, "", [0] * 23, finish_reason="stop")
    return RequestOutput("1", None, [0] * 100, [completion], True, metrics)


def totals(*outputs: RequestOutput) -> str:
    meter = Meter(len(outputs))
    for output in outputs:
        meter.count(output)
        meter.finished += 1
    return meter.summary()


def test_rates_at_the_end_are_those_of_the_work_however_rarely_one_looked() -> None:
    one = {"first_scheduled_time": 10.0, "first_token_time": 35.0, "finished_time": 36.0}
    assert totals(finished(**one)).endswith(", 4.0 tok/s in, 22.0 tok/s out"), "and not 22 tokens in 26 s"
    later = {"first_scheduled_time": 60.0, "first_token_time": 85.0, "finished_time": 86.0}
    assert totals(finished(**one), finished(**later)).endswith(", 4.0 tok/s in, 22.0 tok/s out"), "without the pause"
    beside = {"first_scheduled_time": 10.0, "first_token_time": 35.0, "finished_time": 36.0}
    assert totals(finished(**one), finished(**beside)).endswith(", 8.0 tok/s in, 44.0 tok/s out")
    twice = finished(**one, prefill_tokens=200, cached_tokens=64, drafted_tokens=8, accepted_tokens=5)
    told = totals(twice)
    assert told.startswith("1 prompt, 200 tokens computed, 64 found in the prefix cache, 23 generated in ")
    assert told.endswith(", 4.0 tok/s in, 22.0 tok/s out, 5 of 8 drafts accepted"), "what was computed again came later"
    assert twice.metrics.prefill_rate == 4.0
    assert "tok/s" not in totals(finished(finished_time=36.0))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=12))
def test_spans_count_each_second_once(spans: list[tuple[int, int]]) -> None:
    union = Spans()
    for begin, length in spans:
        union.add(begin, begin + length)
    assert union.seconds == len({second for begin, length in spans for second in range(begin, begin + length)})


class Closed(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("stderr", [None, Closed()], ids=["none", "closed"])
def test_a_process_without_standard_error_generates(
    stderr: Any, model: str, at_once: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(model, kvcache_block_size=16, num_gpu_blocks=80) as llm:
        monkeypatch.setattr("sys.stderr", stderr)
        assert len(llm.generate("Hello", greedy(2))[0].outputs[0].token_ids) == 2
        assert llm.watch_steps(None) is None, "nothing watches the steps that follow"
    assert capsys.readouterr().out == ""
