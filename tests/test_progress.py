"""What a person sees of running requests: a bar of tqdm, on a terminal and elsewhere."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import GREEDY, SMALL_CACHE, set_stdin
from engines import greedy
from tqdm import tqdm

from nanovllm import LLM
from nanovllm.apps.cli.main import main
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.errors import RequestError
from nanovllm.features import progress_bar
from nanovllm.features.progress_bar import Meter
from nanovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput

DOCUMENT = "All that is known. " * 40
LAYERWISE = ["--enable-cpu-offload", "--kvcache-block-size", "16", "--num-gpu-blocks", "6", "--num-cpu-blocks", "60"]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is shown, however fast it is."""
    monkeypatch.setattr(progress_bar, "REDRAW", 0.0)


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
    command = ["chat", "--model", model, *options, *GREEDY, "--document", str(tmp_path / "document"), "--progress"]
    assert main([*command, "--max-num-batched-tokens", "256"]) == 0
    is_layerwise = any(batch.layerwise is not None for batch in batches)
    assert is_layerwise == (options is LAYERWISE)
    printed = capsys.readouterr()
    before, after = printed.err.split("[document: ")
    assert f"loading {model}" in before and printed.out != ""
    drawn = [line for line in before.split("\r") if "prefill" in line]
    shares = [int(share) for line in drawn for share in re.findall(r"prefill (\d+)% of 7\d\d tokens", line)]
    assert shares == sorted(shares) and len(set(shares)) >= 6, "also within a step"
    assert re.search(r"prefill \d+% of 7\d\d tokens, \d+:\d+ left, [\d,.]+ tok/s in", drawn[-1])
    assert ("to the host" in before) == is_layerwise
    assert re.search(r"\d+ tokens: at most [\d.]+ MB of KV on the device", after)


def test_use_tqdm_is_as_in_vllm(
    model: str, at_once: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bars: list[Any] = []

    def make(**arguments: Any) -> Any:
        bars.append(tqdm(file=io.StringIO(), **arguments))
        return bars[-1]

    with LLM(model, kvcache_block_size=16, num_gpu_blocks=80) as llm:
        llm.generate(["a", "b"], greedy(2), use_tqdm=make)
        (bar,) = bars
        assert bar.total == bar.n == 2 and "tok/s in" in bar.postfix
        assert capsys.readouterr().err == ""
        llm.generate(["a", "b"], greedy(2), use_tqdm=False)
        assert capsys.readouterr().err == ""
        llm.generate(["a", "b"], greedy(2))
        assert "Processed prompts: 100%" in capsys.readouterr().err
        with pytest.raises(RequestError, match="use_tqdm='yes': must be True, False"):
            llm.generate("a", greedy(2), use_tqdm="yes")  # type: ignore[arg-type]
        monkeypatch.setattr("sys.stderr", None)
        assert len(llm.generate("a", greedy(2))[0].outputs[0].token_ids) == 2
        assert llm.watch_steps(None) is None, "nothing watches the steps that follow"


def finished(**times: Any) -> RequestOutput:
    """The output of a request of 100 prompt tokens and 23 generated ones."""
    metrics = RequestMetrics(0.0, **{"prefill_tokens": 100, "first_prefill_tokens": 100, "decode_tokens": 22} | times)
    completion = CompletionOutput(0, "", [0] * 23, finish_reason="stop")
    return RequestOutput("1", None, [0] * 100, [completion], True, metrics)


def totals(*outputs: RequestOutput) -> str:
    meter = Meter()
    for output in outputs:
        meter.count(output)
        meter.finished += 1
    return meter.summary()


def test_rates_at_the_end_are_those_of_the_work_however_rarely_one_looked() -> None:
    one = {"first_scheduled_time": 10.0, "first_token_time": 35.0, "finished_time": 36.0}
    assert totals(finished(**one)).endswith(", 4.0 tok/s in, 22.0 tok/s out"), "and not 22 tokens in 26 s"
    assert totals(finished(**one), finished(**one)).endswith(", 8.0 tok/s in, 44.0 tok/s out")
    again = finished(**one, prefill_tokens=200, cached_tokens=64, drafted_tokens=8, accepted_tokens=5)
    told = totals(again)
    assert told.startswith("1 prompt, 200 tokens computed, 64 found in the prefix cache, 23 generated in ")
    assert told.endswith(", 4.0 tok/s in, 22.0 tok/s out, 5 of 8 drafts accepted"), "what was computed again came later"
    assert "tok/s" not in totals(finished(finished_time=36.0))


def test_the_closing_line_says_what_was_computed_again() -> None:
    told = totals(finished(recomputed_tokens=64), finished(recomputed_tokens=1000, cached_tokens=8))
    assert told.startswith("2 prompts, 200 tokens computed (1,064 of them again), 8 found in the prefix cache, ")
    assert totals(finished()).startswith("1 prompt, 100 tokens computed, 23 generated in ")
