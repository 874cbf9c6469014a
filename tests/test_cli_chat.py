"""`nanovllm chat`: turns about a document that is computed once, /reset, Ctrl-C, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import SMALL_CACHE, at_steps, exit_status, interrupt, make_model, set_stdin

from nanovllm import LLM, SamplingParams
from nanovllm.apps.cli.chat import Conversation
from nanovllm.apps.cli.main import main
from nanovllm.client import EngineClient

OPTIONS = [*SMALL_CACHE, "--temperature", "0", "--max-tokens", "8", "--ignore-eos"]
DOCUMENT = "All that is known. " * 15 + "\n"
OPENING = DOCUMENT.rstrip() + "\n\n"


@pytest.fixture
def document(tmp_path: Path) -> str:
    (tmp_path / "document.txt").write_text(DOCUMENT)
    return str(tmp_path / "document.txt")


def talk(monkeypatch: pytest.MonkeyPatch, model: str, lines: str, *options: str) -> int:
    set_stdin(monkeypatch, lines.encode())
    return main(["chat", "--model", model, *OPTIONS, *options])


def costs(told: str) -> list[tuple[int, int]]:
    """Cached and computed tokens of each request."""
    return [(int(a), int(b)) for a, b in re.findall(r"(\d+) tokens cached, (\d+) computed", told)]


def test_a_conversation_about_a_document(
    model: str, document: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "What?\n\nWhy?\n/reset\nWhat?\n/restart\n/quit\nnever asked\n"
    assert talk(monkeypatch, model, lines, "--document", document) == 0
    printed = capsys.readouterr()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(model, kvcache_block_size=16, num_gpu_blocks=80) as llm:

        def ask(prompt: str) -> str:
            return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text

        what = ask(f"<user>{OPENING}What?<assistant>")
        turns = f"<user>{OPENING}What?<assistant>{what}<user>Why?<assistant>"
        why = ask(turns)
        assert printed.out == f"{what}\n{why}\n{what}\n"
        lengths = [len(llm.engine.tokenizer.encode(text)) for text in ("<user>" + OPENING, turns)]
    told = costs(printed.err)
    document_blocks = lengths[0] // 16 * 16
    assert told[0] == (0, lengths[0]) and "[document: " in printed.err.splitlines()[0]
    assert told[1][0] == document_blocks, "the document is computed once"
    assert told[2][0] > document_blocks and sum(told[2]) == lengths[1], "and so is the first turn"
    assert sum(told[3]) == sum(told[1]) and told[3][0] == (sum(told[1]) - 1) // 16 * 16, "as it was asked before"
    cut = "length: the answer was cut at 8 tokens: raise --max-tokens, or ask it to go on]"
    assert re.search(r"8 generated at [\d.,]+ tok/s, " + cut, printed.err)
    assert "/restart is not a command" in printed.err


def test_a_turn_that_computes_old_tokens_again_says_so(
    model: str, document: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache holds the document and one question."""
    questions = ["a " * 25, "b " * 25, "a " * 25]
    lines = "\n/reset\n".join(questions) + "\n"
    assert talk(monkeypatch, model, lines, "--document", document, "--num-gpu-blocks", "22") == 0
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[")]
    assert len(told) == 4 and all(re.search(r"\d computed in [\d.]+ s", line) for line in told[:3])
    assert re.search(r"\d+ tokens cached, \d+ computed \(\d+ of them again\) in [\d.]+ s, 8 generated", told[3])


def test_an_interrupt_ends_the_answer_and_keeps_the_document(
    model: str, document: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_steps(monkeypatch, {6: interrupt})
    assert talk(monkeypatch, model, "What?\nWhat else?\n", "--document", document) == 0
    told = capsys.readouterr().err.splitlines()
    assert "5 generated" in told[1] and told[1].endswith("abort]")
    assert "8 generated" in told[2] and costs(told[2])[0][0] >= costs(told[1])[0][0] > 0


def test_a_question_of_several_lines(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    prompt = Conversation.prompt
    monkeypatch.setattr(Conversation, "prompt", lambda self, question: asked.append(question) or prompt(self, question))
    lines = 'one\n"""\n  two\n\nthree \n"""\n"""four"""\n"""five\n/quit\nsix"""\n"""not ended\n'
    assert talk(monkeypatch, model, lines, "--max-tokens", "1") == 0
    assert asked == ["one", "two\n\nthree", "four", "five\n/quit\nsix", "not ended"]
    assert capsys.readouterr().err.count("1 generated") == 5


def test_an_answer_is_bounded_by_default_and_starts_from_what_the_checkpoint_recommends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[SamplingParams] = []
    add = EngineClient.add

    def noted(self: EngineClient, request: Any) -> None:
        used.append(request.params)
        add(self, request)

    monkeypatch.setattr(EngineClient, "add", noted)
    make_model(tmp_path)
    for recommended, options, expected in (
        ({}, [], (1024, 1.0)),
        ({"temperature": 0.5, "top_k": 3}, [], (1024, 0.5)),
        ({"temperature": 0.5, "max_new_tokens": 7}, ["--temperature", "0"], (7, 0.0)),
        ({"max_new_tokens": 7}, ["--max-tokens", "none"], (None, 1.0)),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
        set_stdin(monkeypatch, b"hi\n")
        command = ["chat", "--model", str(tmp_path), *SMALL_CACHE, "--max-model-len", "40", *options]
        assert main(command) == 0
        assert (used[-1].max_tokens, used[-1].temperature) == expected
        assert used[-1].top_k == recommended.get("top_k", 0)


def test_refusals_cost_one_sentence(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in {"empty": b" \n", "bytes": b"\xff", "long": b"x" * 3000}.items():
        (tmp_path / name).write_bytes(content)
    for options, told in (
        (["--document", f"{tmp_path}/nothing"], "nothing' cannot be read: No such file"),
        (["--document", f"{tmp_path}/empty"], "is empty: give a text to talk about"),
        (["--document", f"{tmp_path}/bytes"], "is not UTF-8"),
        (["--chat-template", f"{tmp_path}/bytes"], "is not UTF-8"),
        (["--n", "2"], "unknown argument '--n'"),
        (["--top-p", "2"], "top_p=2.0"),
        (["--document", f"{tmp_path}/long"], "max_model_len is 1024"),
    ):
        set_stdin(monkeypatch, b"hi\n")
        assert exit_status(["chat", "--model", model, *OPTIONS, *options]) == 2
        printed = capsys.readouterr()
        (sentence,) = printed.err.splitlines()
        assert printed.out == "" and sentence.startswith("nanovllm chat: error: ") and told in sentence
