"""Structured outputs on real engines: random weights over a byte-level tokenizer, so that only the mask helps."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from engines import offloaded, random_prompt
from tokenizer_files import END, write_byte_fallback, write_byte_level

from nanovllm import LLM, CompletionOutput, RequestOutput, SamplingParams
from nanovllm.errors import RequestError
from nanovllm.features.structured_outputs import LLGuidanceCompiler, checks, grammars
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.text.tokenizer import load_tokenizer

VOCAB = 300
EOS = 277
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["admin", "user"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "age", "role", "tags"],
    "additionalProperties": False,
}


class Person:
    """What is asked of a pydantic model class."""

    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        return {name: value for name, value in PERSON.items() if name != "additionalProperties"}


LIST = 'start: "[" item ("," item){0,4} "]"\nitem: /[a-z]{1,3}/ | "日本"'
LIST_GBNF = 'root ::= "[" item ("," item)* "]"\nitem ::= [a-c] | "(" item ")"'
ENGINES: dict[str, dict[str, Any]] = {
    "resident": {"num_gpu_blocks": 60},
    "chunks": {"num_gpu_blocks": 60, "max_num_batched_tokens": 21},
    "preempted": {"num_gpu_blocks": 14, "max_num_batched_tokens": 40, "preemption_mode": "recompute"},
    "swapped": {"num_gpu_blocks": 16, "max_num_batched_tokens": 40, "preemption_mode": "swap", "swap_space": 0.01},
    "offloaded": offloaded(16, 4, 60, max_num_batched_tokens=64),
}


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        list(person) == ["name", "age", "role", "tags"]
        and 1 <= len(person["name"]) <= 8
        and type(person["age"]) is int
        and 0 <= person["age"] <= 120
        and person["role"] in ("admin", "user")
        and len(person["tags"]) <= 2
        and all(type(tag) is bool for tag in person["tags"])
    )


def is_nested_list(text: str) -> bool:
    items = text.removeprefix("[").removesuffix("]").split(",")
    return text[:1] + text[-1:] == "[]" and all(
        re.fullmatch(r"\(*[a-c]\)*", item) and item.count("(") == item.count(")") for item in items
    )


KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "schema": ({"json": PERSON, "disable_any_whitespace": True}, is_person),
    "schema as text": ({"json": json.dumps(PERSON), "whitespace_pattern": "[ ]"}, is_person),
    "model class": (
        {"json": Person, "disable_any_whitespace": True, "disable_additional_properties": True},
        is_person,
    ),
    "object": (
        {"json_object": True, "disable_any_whitespace": True},
        lambda text: isinstance(json.loads(text), dict),
    ),
    "regex": ({"regex": r"(\d{2}|é){3}-[^x]?"}, lambda text: re.fullmatch(r"(\d{2}|é){3}-[^x]?", text)),
    "choice": ({"choice": ['say "hi"\n', "日本", "a", ""]}, lambda text: text in ('say "hi"\n', "日本", "a", "")),
    "grammar": ({"grammar": LIST}, lambda text: re.fullmatch(r"\[([a-z]{1,3}|日本)(,([a-z]{1,3}|日本)){0,4}\]", text)),
    "GBNF": ({"grammar": LIST_GBNF}, is_nested_list),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_byte_level(path)
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None and tokenizer.encode(END, add_special_tokens=False) == [EOS]
    make_checkpoint(path, vocab=VOCAB, eos_token_id=EOS)  # more tokens than the tokenizer has
    return path


def engine(model_dir: Path, name: str, **others: Any) -> LLM:
    return LLM(model_dir, **{"kvcache_block_size": 16, "max_logprobs": VOCAB, **ENGINES[name], **others})


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    with engine(model_dir, "resident") as llm:
        yield llm


def run(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def structured(kind: str, **params: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 180, "structured_outputs": KINDS[kind][0], **params})


# ---- what comes out


@pytest.mark.parametrize("kind", KINDS)
def test_every_output_matches(llm: LLM, kind: str) -> None:
    matches = KINDS[kind][1]
    params = [structured(kind, temperature=0.0), *(structured(kind, seed=seed, n=2) for seed in range(4))]
    ended = 0
    for output in run(llm, [random_prompt(5, VOCAB, seed) for seed in range(5)], params):
        for completion in output.outputs:
            assert completion.finish_reason in ("stop", "length"), output.error
            if completion.finish_reason == "stop":
                ended += 1
                assert matches(completion.text), completion.text
                assert completion.token_ids[-1] == EOS and EOS not in completion.token_ids[:-1]
            else:
                assert len(completion.token_ids) == 180 and kind in ("object", "GBNF"), "others are bounded"
    assert ended >= (1 if kind in ("object", "GBNF") else 9)


BESIDE = [structured(kind, seed=index, n=2, logprobs=3, max_tokens=30) for index, kind in enumerate(KINDS)]
BESIDE += [SamplingParams(temperature=0.0, max_tokens=30), structured("regex", temperature=0.0, logprobs=1)]
PROMPTS = [random_prompt(length, VOCAB, 2) for length in (5, 17, 32, 33, 3, 60, 16, 20, 21, 7)]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[CompletionOutput]]:
    """The outputs of requests that run one at a time."""
    return [run(llm, [prompt], params)[0].outputs for prompt, params in zip(PROMPTS, BESIDE, strict=True)]


@pytest.mark.parametrize("name", ENGINES)
def test_outputs_do_not_depend_on_batch_or_memory(
    model_dir: Path, name: str, alone: list[list[CompletionOutput]]
) -> None:
    """Tokens and log-probabilities to the bit."""
    with engine(model_dir, name) as llm:
        assert [output.outputs for output in run(llm, PROMPTS, BESIDE)] == alone
        metrics = llm.metrics()
    assert metrics.blocks.used == 0
    assert name != "preempted" or metrics.preemptions.recomputed > 0
    assert name != "swapped" or metrics.preemptions.swapped > 0


def test_stop_strings_and_stop_tokens(llm: LLM) -> None:
    (completion,) = run(llm, [[1, 2]], structured("schema", stop='"age"', seed=1))[0].outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", '"age"') and '"age"' not in completion.text
    # Without the model's own end token, a given one ends the output where the grammar allows that.
    params = structured("regex", ignore_eos=True, stop_token_ids=[EOS + 1], seed=1)
    (completion,) = run(llm, [[1, 2]], params)[0].outputs
    assert completion.stop_reason == completion.token_ids[-1] == EOS + 1
    assert KINDS["regex"][1](llm.get_tokenizer().decode(completion.token_ids[:-1]))


def test_min_tokens_hold_the_end_back_while_others_may_follow(llm: LLM) -> None:
    regex = {"regex": "a{1,12}"}
    for least, expected in ((8, range(8, 13)), (13, [12])):
        params = SamplingParams(structured_outputs=regex, min_tokens=least, max_tokens=20, seed=3, n=6)
        for completion in run(llm, [[1, 2]], params)[0].outputs:
            assert completion.finish_reason == "stop" and len(completion.text) in expected


def test_with_allowed_tokens_processors_and_penalties(llm: LLM) -> None:
    digits = [ord(digit) for digit in "0135"]
    params = SamplingParams(
        structured_outputs={"regex": "[a-z0-9]{10}"},
        allowed_token_ids=[*digits, EOS],
        logits_processors=[lambda token_ids, logits: logits * 0],
        frequency_penalty=2.0,
        temperature=0.0,
        max_tokens=20,
    )
    (completion,) = run(llm, [[1, 2]], params)[0].outputs
    assert re.fullmatch("[0135]{10}", completion.text) and completion.finish_reason == "stop"
    assert max(map(completion.text.count, "0135")) == 3, "penalties choose among what the mask leaves"


@pytest.mark.parametrize("kind", ["schema", "choice", "regex"])
def test_an_output_that_does_not_match_ends_with_an_error(llm: LLM, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the mask let through; what was cut is not judged."""
    given = {
        "schema": {"json": {"type": "integer", "minimum": 1, "maximum": 8}},
        "choice": {"choice": ["a", "b", "c"]},
        "regex": {"regex": "[abc]"},
    }[kind]
    monkeypatch.setattr(checks.SchemaCheck, "error", lambda self, text: f"{text} is too small")
    monkeypatch.setattr(grammars, "_choice_error", lambda choices, text: f"{text} is none of them")
    llm.engine._inputs.sampling.grammars._matchers.clear()
    ended, cut = run(
        llm, [[1, 2]] * 2, [SamplingParams(structured_outputs=given, max_tokens=n, seed=1) for n in (9, 1)]
    )
    llm.engine._inputs.sampling.grammars._matchers.clear()
    if kind == "regex":
        assert ended.outputs[0].finish_reason == "stop" and ended.error is None, "the grammar alone knows"
    else:
        assert ended.outputs[0].finish_reason == "error"
        assert "the structured output does not match what was asked for: " in (ended.error or "")
    assert cut.outputs[0].finish_reason == "length" and cut.error is None


# ---- masks


def test_a_tokenizer_with_marks_for_spaces_and_bytes(tmp_path: Path) -> None:
    """As SentencePiece makes them, with an end token that is not the tokenizer's."""
    make_checkpoint(tmp_path, vocab=320, eos_token_id=310)
    write_byte_fallback(tmp_path)
    params = SamplingParams(structured_outputs={"regex": "( [a-f]{2,4}|é日?){3} x"}, max_tokens=60, seed=4, n=4)
    with LLM(tmp_path, num_gpu_blocks=40, kvcache_block_size=16) as llm:
        for completion in run(llm, "a prompt", params)[0].outputs:
            assert re.fullmatch("( [a-f]{2,4}|é日?){3} x", completion.text) and completion.token_ids[-1] == 310


# ---- refusals


def chain(length: int) -> dict[str, Any]:
    """A schema whose objects nest as deep as that, without brackets that do."""
    parts: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)
    }
    return {"$defs": {**parts, f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def rules(length: int) -> str:
    """A grammar with a chain of rules as long as that."""
    return "start: r0\n" + "\n".join(f'r{i}:"a"r{i + 1}' for i in range(length)) + f"\nr{length}:"


@pytest.mark.parametrize(
    "given, says",
    [
        ({"regex": "(("}, r"regex='\(\(': cannot be used for structured outputs: .*unclosed group"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, "cannot be used for structured outputs"),
        ({"regex": "a" * (1 << 15) + "b"}, "it has 32,769 bytes: give at most 32,768"),
        ({"json": {"not": {"type": "string"}}}, 'Unimplemented keys: \\["not"\\]'),
        ({"json": {"$ref": "file:///etc/passwd"}}, "not present in a registry"),
        ({"json": {"enum": ["a" * (1 << 17)]}}, "bytes: give at most 131,072"),
        ({"json": {"enum": [{}] * 3_000}}, "json has 3,001 objects: give at most 3,000"),
        ({"grammar": "start: missing"}, 'unknown name: "missing"'),
        ({"grammar": rules(6_000)}, "bytes: give at most 32,768"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_grammars_that_cannot_be_used_are_refused(llm: LLM, given: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as refusal:
        run(llm, [[1, 2]], SamplingParams(structured_outputs=given))
    assert len(str(refusal.value)) < 1000 and "\n" not in str(refusal.value)
    assert is_person(run(llm, [[1, 2]], structured("schema", seed=1))[0].outputs[0].text), "the engine goes on"


@pytest.mark.parametrize("given", [{"json": chain(950)}, {"grammar": rules(2_300)}], ids=["schema", "grammar"])
def test_deep_grammars_have_the_stack_that_they_need(llm: LLM, given: dict[str, Any]) -> None:
    """They would overflow the stack of another thread, which would end the process."""
    output = run(llm, [[1, 2]], SamplingParams(structured_outputs=given, max_tokens=3))[0].outputs[0]
    assert output.finish_reason in ("length", "stop")


def test_a_mask_without_measure_ends_its_request_alone(llm: LLM) -> None:
    beside = structured("schema", seed=1)
    exploding = SamplingParams(structured_outputs={"regex": "b((a{1000}){1000}){1000}"}, max_tokens=50)
    failed, other = run(llm, [[1, 2], [1, 2]], [exploding, beside])
    assert "the structured output cannot go on" in (failed.error or "")
    assert other.outputs == run(llm, [[1, 2]], beside)[0].outputs


def test_other_threads_run_while_a_grammar_is_compiled(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library releases the interpreter's lock: without that the other thread would stand still."""
    import llguidance

    real = llguidance.LLMatcher
    is_compiling = [False]

    class Watched:
        grammar_from_regex = real.grammar_from_regex

        def __new__(cls, *args: Any, **options: Any) -> Any:
            is_compiling[0] = True
            made = real(*args, **options)
            is_compiling[0] = False
            return made

    with engine(model_dir, "resident") as llm:
        compiler = llm.engine._inputs.sampling.grammars
        assert isinstance(compiler, LLGuidanceCompiler)
        monkeypatch.setattr(llguidance, "LLMatcher", Watched)
        long = StructuredOutputsParams(regex="".join(f"(x|y{i})*" for i in range(1_500)))
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(compiler.prepare, long)
            turns = 0
            while not made.done():
                turns += is_compiling[0]
                time.sleep(0)  # leaves the lock to the other thread
        assert made.result() is not None and turns > 100


def test_closing_ends_the_threads(model_dir: Path) -> None:
    with engine(model_dir, "resident") as llm:
        run(llm, [[1]], structured("regex"))
        compiler = llm.engine._inputs.sampling.grammars
        assert isinstance(compiler, LLGuidanceCompiler)
    assert compiler._pool._shutdown
    llm.close()


def test_what_would_compile_for_minutes_is_refused() -> None:
    with pytest.raises(RequestError, match=r"multipleOf=9999991: must be at most 100,000"):
        grammars.check_multiples({"properties": {"x": [{"type": "integer", "multipleOf": 9999991}]}})
    grammars.check_multiples({"type": "integer", "multipleOf": 1000, "properties": {"multipleOf": {"type": "number"}}})
