"""Agents' sessions: the patterns, what counts as an old token, and how many of them are computed again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import session_tables
from content_model import VOCAB
from fast import fast_only
from session_helpers import CACHE, MODELS, SessionBench
from session_processes import KilledEngines

from benchmarks.peers import run_llama_session
from benchmarks.session_first_token import first_tokens, talk_of
from benchmarks.session_patterns import (
    KNOWN_BOUND,
    OTHER_BOUND,
    PATTERNS,
    Asked,
    Player,
    Talk,
    Tokens,
    append,
    bound,
    cell,
    common_length,
    cut_result,
    worst,
)
from benchmarks.sessions import FAMILIES, Memory, has_full_attention_only, main, play, write_model

TALK = Talk(answer=30, reasoning=20, vocab=VOCAB)
BETWEEN = 8192  # tokens
SMALL = Talk(system=40, message=10, answer=8, reasoning=5, summary=20, result=50, turns=8)


# ---- patterns and counts


def forgetful(prompt: Tokens) -> tuple[Tokens, int]:
    """An engine without a cache."""
    return SMALL.words(SMALL.answer, str(prompt)), 0


@pytest.mark.parametrize(
    "pattern, known, other",  # where requests after the first begin to be new
    [
        ("append", 7, 0),
        ("reasoning stripped", 7, 0),
        ("reasoning and its opening stripped", 0, 7),
        ("edited in the middle", 6, 1),
        ("regenerated, another last message", 11, 0),
        ("compaction", 6, 1),
        ("two sessions in turns", 14, 1),
        ("tool result, then a branch", 7, 0),
        ("tool result cut in half", 6, 1),
    ],
)
def test_a_pattern_parts_where_it_says(pattern: str, known: int, other: int) -> None:
    first, *asked = Player(forgetful).play(PATTERNS[pattern](SMALL, "a"))
    assert first == Asked(50 + (3 if "opening" in pattern else 0), 0, 0, False)
    assert [sum(each.is_known is kind for each in asked) for kind in (True, False)] == [known, other]
    assert all(each.old >= SMALL.system for each in asked)


def test_old_tokens_are_those_of_the_longest_common_beginning() -> None:
    cached = {"first": 0, "longer": 3, "parted": 2, "parted again": 4, "other": 0}
    player = Player(lambda prompt: ([], 0))
    notes = [
        player.note(prompt, answer, count)
        for prompt, answer, count in zip(
            ([1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9], [1, 2, 3, 4, 8], [7]),
            ([4, 5], [], [], [], []),
            cached.values(),
            strict=True,
        )
    ]
    assert notes == [
        Asked(3, 0, 0, False),
        Asked(6, 5, 3, True),  # an answer ended there
        Asked(5, 4, 2, False),
        Asked(5, 4, 4, True),  # prompts parted there
        Asked(1, 0, 0, True),  # the very beginning, where the first prompt was new
    ]
    assert [note.recomputed for note in notes] == [0, 2, 2, 0, 0]
    assert cell(notes) == "2" and cell([Asked(4000, 3000, 1096, False), notes[1]]) == "1,904 the first time, then 2"


def test_common_length() -> None:
    words = TALK.words(100, "any")
    for length in (0, 1, 50, 99):
        other = [*words[:length], VOCAB, *words[length + 1 :]]
        assert common_length(words, other) == common_length(other, words) == length
    assert common_length(words, words[:30]) == 30 and common_length([], words) == 0


# ---- the bounds


def misses(rows: Iterable[tuple[str, list[Asked]]], full_attention: bool) -> dict[str, list[Asked]]:
    """By pattern the requests that computed more old tokens again than they may."""
    found = {name: [each for each in asked if each.recomputed > bound(each, full_attention)] for name, asked in rows}
    assert found, "something was played"
    return {name: asked for name, asked in found.items() if asked}


FAST = [("windows of 512 in five layers of six", False), ("windows and recurrent layers", True)]


@pytest.mark.parametrize("model, offload", fast_only(FAST, product(MODELS, (False, True))))
def test_no_session_computes_old_tokens_again(model: str, offload: bool) -> None:
    """In a cache with room for all sessions of a model without windows, and between their requests unrelated ones."""
    windows, is_recurrent = MODELS[model]
    bench = SessionBench(windows, is_recurrent, offload=offload, answer=TALK.answer)
    assert misses(bench.play(TALK, BETWEEN), model == "full attention") == {}


@pytest.mark.parametrize("model", MODELS)
def test_prompts_that_end_with_a_block(model: str) -> None:
    """Their answers are shorter than a block, so that no other block ends before the next message."""
    windows, is_recurrent = MODELS[model]
    talk = Talk(system=1900, message=148, answer=108, turns=4, vocab=VOCAB)
    asked = Player(SessionBench(windows, is_recurrent, answer=talk.answer).ask).play(append(talk, "aligned"))
    assert [each.prompt_len % 256 for each in asked] == [0] * 4
    assert [each.recomputed <= KNOWN_BOUND for each in asked] == [True] * 4


@pytest.mark.parametrize("model", fast_only(["full attention", "windows and recurrent layers"], MODELS))
def test_the_latest_session_is_kept_in_a_quarter_of_the_memory(model: str) -> None:
    windows, is_recurrent = MODELS[model]
    bench = SessionBench(windows, is_recurrent, tokens=CACHE // 4, answer=TALK.answer)
    assert misses(bench.play(TALK), model == "full attention") == {}


def test_few_state_slots_keep_where_sessions_part() -> None:
    """New sessions go on from the system prompt, whose state no request of the session before began from."""
    windows, is_recurrent = MODELS["recurrent layers"]
    bench = SessionBench(windows, is_recurrent, states=(4, 12), answer=TALK.answer)
    played = dict(bench.play(TALK, BETWEEN))
    lost = {name: worst(asked, True) for name, asked in played.items() if worst(asked, True) > KNOWN_BOUND}
    assert lost == {} and len(played) > 3
    first = [asked[0].recomputed for asked in played.values()]
    assert max(first[2:]) <= KNOWN_BOUND < first[1], "the second session shows where prompts part"


def cut_result_of(model: str, tokens: int) -> list[Asked]:
    """The requests of a session whose tool result is cut, before each an unrelated prompt."""
    windows, is_recurrent = MODELS[model]
    talk = Talk(vocab=VOCAB)
    bench = SessionBench(windows, is_recurrent, tokens=tokens, answer=talk.answer)

    def interrupt(number: int) -> None:
        bench.ask(talk.words(BETWEEN, f"between {number}"), 1)

    return Player(bench.ask).play(cut_result(talk, "cut"), interrupt)


def test_a_long_prompt_has_states_where_windows_are_kept() -> None:
    """Its chunks may end elsewhere."""
    assert 256 < worst(cut_result_of("windows and recurrent layers", CACHE // 4), False) <= OTHER_BOUND


def test_windows_that_are_computed_again_are_kept() -> None:
    """The second prompt that parts in the result finds the window, although an earlier one had left it behind."""
    assert worst(cut_result_of("windows and recurrent layers", CACHE * 5 // 8), True) <= KNOWN_BOUND


SHORT = ("reasoning stripped", "compaction", "tool result cut in half")
WAYS = [
    *product(FAMILIES, ("resident",)),
    *product(("gpt_oss", "qwen3_5", "gemma3"), ("offloaded",)),
    *product(("qwen3_5", "gemma3"), ("restarted",)),
]


@pytest.mark.slow
@pytest.mark.parametrize("family, way", WAYS)
def test_no_session_of_a_real_engine_computes_old_tokens_again(family: str, way: str, tmp_path: Path) -> None:
    """`restarted`: a new engine finds the blocks of each session's last requests on disk."""
    model = write_model(tmp_path / "model", family, TALK)
    directory = tmp_path / "kv" if way == "restarted" else None
    memory = Memory(CACHE // 2, offload=way == "offloaded", kv_cache_dir=directory)
    rows = play(model, memory, TALK, SHORT, BETWEEN // 2)
    assert misses(rows, has_full_attention_only(model)) == {}


@pytest.mark.parametrize("family, pattern", [("gemma3", "reasoning stripped"), ("qwen3_5", "compaction")])
def test_a_short_session_of_a_real_engine(family: str, pattern: str, tmp_path: Path) -> None:
    talk = Talk(system=1500, answer=20, reasoning=10, turns=4)
    model = write_model(tmp_path / "model", family, talk)
    ((_, asked),) = play(model, Memory(tokens=5120), talk, [pattern])
    assert [each.recomputed <= bound(each) for each in asked] == [True] * 4


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_a_session_goes_on_after_its_process_was_killed(family: str, tmp_path: Path) -> None:
    """What its engine had handed to the disk before was written, but the engine was never closed."""
    talk = Talk(system=1500, answer=20, reasoning=10, turns=4)
    model = write_model(tmp_path / "model", family, talk)
    memory = Memory(tokens=5120, kv_cache_dir=tmp_path / "kv")
    rows = play(model, memory, talk, ("reasoning stripped", "compaction"), make=KilledEngines)
    assert misses(rows, has_full_attention_only(model)) == {}


@pytest.mark.slow
def test_the_script_writes_a_table_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sessions.json"
    options = ["--families", "qwen3", "gemma3", "--patterns", "append", "compaction", "--system", "600", "--turns", "4"]
    assert main([*options, "--between", "0", "--cache", "1/4", "--output-json", str(file)]) == 0
    report = json.loads(file.read_text())
    found = report["results"]["12800"]
    assert (
        f"| append | {found['qwen3']['append']['cell']} | {found['gemma3']['append']['cell']} |"
        in capsys.readouterr().out
    )
    row = found["gemma3"]["append"]
    assert row["requests"] == 4 and 0 < row["worst_at_known_places"] <= 256 < row["old_tokens"] < row["prompt_tokens"]


@pytest.mark.slow
def test_the_script_of_less_memory_writes_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures are those of a real engine."""
    file = tmp_path / "tables.json"
    assert session_tables.main(["--cache", "1/4", "--models", "full attention", "--output-json", str(file)]) == 0
    found = json.loads(file.read_text())["results"]["12800 resident"]["full attention"]
    assert found["cells"]["compaction"] == "2,492" and 0.3 < found["recomputed_tokens"] / found["old_tokens"] < 0.4
    assert "| compaction | 2,492 |" in capsys.readouterr().out


# ---- time to first token


def test_the_last_turn_is_compared_with_a_full_prefill() -> None:
    """Of an engine that takes a second for each token that it does not know from the last prompt."""
    heard: list[tuple[int, int, bool]] = []
    last = Tokens()

    def answer(prompt: Tokens, length: int, is_fresh: bool) -> tuple[Tokens, float]:
        nonlocal last
        heard.append((len(prompt), length, is_fresh))
        known = 0 if is_fresh else common_length(prompt, last)
        last = prompt
        return Talk().words(length, str(len(prompt))), float(len(prompt) - known)

    found = first_tokens("an engine", "a model", answer, talk_of(3000))
    turns = [(3000 - 190 * left, 100, False) for left in reversed(range(10))]
    assert heard[1:] == [*turns, (3000, 1, True)]
    assert (found.prompt_len, found.full_prefill, len(found.turns)) == (3000, 3000.0, 10)
    assert found.turns[-1] == 190.0 and found.ratio == 190 / 3000


def test_llama_cpp_answers_one_turn_after_the_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a module in the place of its bindings."""
    resets: list[int] = []

    class Llama:
        def __init__(self, **settings: Any) -> None:
            assert settings["model_path"] == "file.gguf" and settings["n_ctx"] == 30

        def reset(self) -> None:
            resets.append(1)

        def generate(self, prompt: Tokens, **settings: Any) -> Iterator[int]:
            yield from count(sum(prompt))

    asked = [{"prompt": [1, 2], "tokens": 3, "fresh": False}, {"prompt": [5], "tokens": 1, "fresh": True}]
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama))
    monkeypatch.setattr("sys.stdin", [json.dumps(each) for each in asked])
    run_llama_session.main("file.gguf", {"threads": 1, "max_len": 30})
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [tokens for tokens, seconds in answers if seconds > 0] == [[3, 4, 5], [5]] and resets == [1]
