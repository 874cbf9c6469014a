"""The outputs of steps: everything so far, what is new, or nothing before the end."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from engine_helpers import Bench, prompt_of
from test_requests import SpelledOut

from nanovllm.data.batch import Batch, Sample, StepResult, TokenLogprobs
from nanovllm.outputs import CompletionOutput, RequestOutput, RequestOutputKind

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
KINDS = pytest.mark.parametrize("kind", list(RequestOutputKind), ids=lambda kind: kind.name)


def streamed(bench: Bench) -> dict[str, list[RequestOutput]]:
    """All outputs of each request."""
    outputs = defaultdict(list)
    for step in bench.steps():
        for output in step:
            outputs[output.request_id].append(output)
    return dict(outputs)


def only(output: RequestOutput) -> CompletionOutput:
    (completion,) = output.outputs
    return completion


def speaking(**options: Any) -> Bench:
    """A bench whose executor reports a logprob for each token and for each prompt token."""
    bench = Bench(tokenizer=SpelledOut(), **options)
    execute = bench.executor.execute

    def found(token_id: int) -> TokenLogprobs:
        return TokenLogprobs(-float(token_id), 1, (), ())

    def with_logprobs(batch: Batch) -> StepResult:
        result = execute(batch)
        samples = [[Sample(s.token_id, found(s.token_id)) for s in row] for row in result.samples]
        targets = [seq.prompt_targets.token_ids if seq.prompt_targets else () for seq in batch.sequences]
        prompts = [[found(token_id) for token_id in token_ids] for token_ids in targets]
        return StepResult(samples, result.h2d_bytes, result.d2h_bytes, prompts)

    bench.executor.execute = with_logprobs  # type: ignore[method-assign]
    return bench


def test_deltas_join_to_what_cumulative_outputs_hold() -> None:
    bench = Bench(tokenizer=SpelledOut(), budget=8)
    for kind in RequestOutputKind:
        bench.add(kind.name, prompt_of(20), 6, output_kind=kind, stop=["zzz"])
    outputs = streamed(bench)
    texts = [only(output).text for output in outputs["CUMULATIVE"]]
    final = outputs["CUMULATIVE"][-1]
    for kind, pieces in outputs.items():
        assert [output.finished for output in pieces] == [False] * (len(pieces) - 1) + [True], kind
        assert all(output.prompt_token_ids == prompt_of(20) for output in pieces)
        assert only(pieces[-1]).finish_reason == "length"
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert len(outputs["FINAL_ONLY"]) == 1 and only(outputs["FINAL_ONLY"][0]) == only(final)
    news = [only(output) for output in outputs["DELTA"] if output.outputs]
    assert len(news) == 6 and all(len(new.token_ids) == 1 for new in news)
    assert "".join(new.text for new in news) == only(final).text
    assert [token for new in news for token in new.token_ids] == only(final).token_ids


@KINDS
def test_logprobs_come_as_the_tokens_do(kind: RequestOutputKind) -> None:
    bench = speaking(budget=8)
    bench.add("a", prompt_of(20), 5, output_kind=kind, logprobs=0, prompt_logprobs=0)
    outputs = streamed(bench)["a"]
    prompt = []
    tokens = []
    values = []
    for output in outputs if kind is DELTA else outputs[-1:]:
        prompt += output.prompt_logprobs or []
        for new in output.outputs:
            tokens += new.token_ids
            values += new.logprobs or []
    assert [next(iter(entry)) for entry in values] == tokens and len(tokens) == 5
    assert prompt[0] is None and [next(iter(entry)) for entry in prompt[1:] if entry] == prompt_of(20)[1:]
    assert only(outputs[-1]).cumulative_logprob == -sum(tokens), "a sum has no parts"


@KINDS
def test_an_abort_gives_the_rest(kind: RequestOutputKind) -> None:
    bench = Bench(tokenizer=SpelledOut())
    bench.add("free", prompt_of(6), 3)
    free = only(bench.run()["free"])
    bench.add("a", prompt_of(6), 8, output_kind=kind, stop=free.text + "!")
    outputs = [output for _ in range(3) for output in bench.step()]
    assert all(only(output).text == "" for output in outputs), "all of it may be the start of a stop string"
    last = bench.engine.abort_request("a")
    assert last is not None and last.finished
    assert (only(last).text, only(last).finish_reason) == (free.text, "abort")
    assert only(last).token_ids == ([] if kind is DELTA else free.token_ids)


def test_deltas_of_a_group_join_to_its_sequences() -> None:
    bench = Bench(tokenizer=SpelledOut())
    for kind in (CUMULATIVE, DELTA):
        bench.add(kind.name, prompt_of(6), 7, output_kind=kind, n=3, temperature=1.0, seed=4)
    bench.add("ranked", prompt_of(6), 7, output_kind=DELTA, n=2, best_of=3, temperature=1.0, seed=4)
    outputs = streamed(bench)
    joined: dict[int, tuple[str, list[int]]] = {}
    for output in outputs["DELTA"]:
        for new in output.outputs:
            text, tokens = joined.get(new.index, ("", []))
            joined[new.index] = (text + new.text, [*tokens, *new.token_ids])
    final = outputs["CUMULATIVE"][-1]
    assert joined == {last.index: (last.text, last.token_ids) for last in final.outputs}
    assert all(not output.outputs for output in outputs["ranked"][:-1])
    assert [len(best.token_ids) for best in outputs["ranked"][-1].outputs] == [7, 7], "everything is new at the end"
