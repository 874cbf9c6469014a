"""The HTTP API in process: answers and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_config
from cli_helpers import make_model
from pydantic import ValidationError
from server_helpers import CACHE, CHAT, COMPLETIONS, NAME, ask, error, held_steps, nothing_left, ok, run_async
from test_async_llm import failing_steps
from tokenizer_files import END as END_TEXT
from tokenizers import Tokenizer, processors

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.apps.server.async_llm import AsyncLLM
from nanovllm.apps.server.protocol import ChatRequest, SamplingFields
from nanovllm.apps.server.requests import SAME_NAME

HELLO = [{"role": "user", "content": "hello"}]
NOT_OFFERED = {"detokenize", "logits_processors", "skip_clone"}  # they are for programs
SAMPLING = {"max_tokens": 8, "ignore_eos": True, "seed": 3, "temperature": 0.8}


@pytest.fixture(scope="module")
def offline(model: str) -> Iterator[LLM]:
    with LLM(model, **CACHE) as llm:
        yield llm


@pytest.fixture(scope="module")
def recommending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    """An engine whose tokenizer puts a token before every text, and whose checkpoint recommends at most 3 tokens."""
    path = Path(make_model(tmp_path_factory.mktemp("recommending")))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    first = (END_TEXT, tokenizer.token_to_id(END_TEXT))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END_TEXT} $A", special_tokens=[first])
    tokenizer.save(str(path / "tokenizer.json"))
    edit_config(path, "generation_config.json", max_new_tokens=3)
    with AsyncLLM(path, **CACHE) as engine:
        yield engine


# ---- requests


def test_every_sampling_parameter_of_a_request_is_passed_on() -> None:
    """A field of the schema that nothing reads would be accepted and ignored; so would one of a batch file's body."""
    own = {"max_tokens", "logprobs", "structured_outputs", "output_kind"}  # read each in its own way
    parameters = {field.name for field in fields(SamplingParams)}
    assert {*SAME_NAME} | own | NOT_OFFERED == parameters
    assert parameters & SamplingFields.model_fields.keys() == {*SAME_NAME, "structured_outputs"}


# ---- answers


def test_completions_equal_generate_to_the_bit(engine: AsyncLLM, offline: LLM) -> None:
    prompts = ["hello world", "x", "日本 and more"]
    params = SamplingParams(**SAMPLING, logprobs=3)  # type: ignore[arg-type]
    expected = [output.outputs[0] for output in offline.generate(prompts, params, use_tqdm=False)]
    answer = ok(engine, COMPLETIONS, prompt=prompts, model=NAME, logprobs=3, return_token_ids=True, **SAMPLING)
    assert answer["object"] == "text_completion" and answer["model"] == NAME
    for index, (choice, completion) in enumerate(zip(answer["choices"], expected, strict=True)):
        assert choice["index"] == index and choice["finish_reason"] == "length"
        assert (choice["text"], choice["token_ids"]) == (completion.text, completion.token_ids)
        found = [at[token].logprob for at, token in zip(completion.logprobs or (), completion.token_ids, strict=True)]
        assert choice["logprobs"]["token_logprobs"] == found, "a JSON number is the float itself"
        assert all(len(top) <= 4 for top in choice["logprobs"]["top_logprobs"])
    tokens = [len(offline.engine.check_prompt(prompt, None)) for prompt in prompts]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(tokens), 24)
    assert usage["total_tokens"] == sum(tokens) + 24


def test_chat_equals_chat(engine: AsyncLLM, offline: LLM) -> None:
    messages = [{"role": "system", "content": "be kind"}, *HELLO]
    params = SamplingParams(**SAMPLING, logprobs=2)  # type: ignore[arg-type]
    (expected,) = offline.chat(messages, params, use_tqdm=False)
    parts = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    ]
    for asked in (messages, parts):
        answer = ok(engine, CHAT, messages=asked, logprobs=True, top_logprobs=2, return_token_ids=True, **SAMPLING)
        (choice,) = answer["choices"]
        assert answer["prompt_token_ids"] == expected.prompt_token_ids
        assert choice["message"]["content"] == expected.outputs[0].text
        assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
        for entry, token, at in zip(
            choice["logprobs"]["content"],
            expected.outputs[0].token_ids,
            expected.outputs[0].logprobs or (),
            strict=True,
        ):
            assert entry["logprob"] == at[token].logprob and len(entry["top_logprobs"]) == 2
            if token < 256:
                assert entry["bytes"] == [token], "the first tokens of this model are the bytes"
                assert entry["token"] == (chr(token) if token < 128 else rf"\x{token:02x}")
            assert entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"]


def test_variables_of_the_template_have_defaults(engine: AsyncLLM) -> None:
    body: dict[str, Any] = {"messages": HELLO}
    serving = {"chat_template": "{{ word }}{{ end }}", "default_chat_template_kwargs": {"word": "xyz", "end": "!"}}
    assert ask(engine, "/tokenize", body, **serving).json()["count"] == 4
    body["chat_template_kwargs"] = {"word": "q"}
    assert ask(engine, "/tokenize", body, **serving).json()["count"] == 2


def test_streams_join_to_the_answer_in_one_piece(engine: AsyncLLM) -> None:
    for more in ({}, {"n": 2, "best_of": 3}, {"stop": ["a"]}, {"echo": True}):
        body = {"prompt": ["hello", "AB"], "logprobs": 1, **SAMPLING, **more}
        whole = ok(engine, COMPLETIONS, **body)
        *chunks, done = ok(engine, COMPLETIONS, stream=True, stream_options={"include_usage": True}, **body)
        assert done == "[DONE]" and chunks[-1]["choices"] == [] and all(chunk["usage"] is None for chunk in chunks[:-1])
        assert len({chunk["id"] for chunk in chunks}) == 1
        for choice in whole["choices"]:
            parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
            assert "".join(part["text"] for part in parts) == choice["text"]
            assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
            assert parts[-1]["stop_reason"] == choice["stop_reason"]
            for name, values in choice["logprobs"].items():
                assert [value for part in parts for value in part["logprobs"][name]] == values
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert chunks[-1]["usage"][name] == whole["usage"][name]


def test_chat_streams_join_to_the_answer(engine: AsyncLLM) -> None:
    body = {"messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": 1, **SAMPLING}
    whole = ok(engine, CHAT, **body)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, done = ok(engine, CHAT, stream=True, stream_options=options, **body)
    assert done == "[DONE]" and {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        logprobs = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert logprobs == choice["logprobs"]["content"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 16


def test_streams_have_the_logprobs_of_prompts_computed_in_chunks(model: str) -> None:
    prompt = list(range(50))
    more = {"max_tokens": 2, "temperature": 0.5, "n": 2, "seed": 1, "ignore_eos": True}
    long = [{"role": "user", "content": "hello " * 9}]
    with AsyncLLM(model, **CACHE, max_num_batched_tokens=16, max_num_seqs=8) as engine:
        body = {"prompt": [prompt, prompt[5:]], "echo": True, "logprobs": 1, "prompt_logprobs": 1, **more}
        whole, *chunks = ok(engine, COMPLETIONS, **body), *ok(engine, COMPLETIONS, stream=True, **body)[:-1]
        for choice in whole["choices"]:
            parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
            for name, values in choice["logprobs"].items():
                assert [value for part in parts for value in part["logprobs"][name]] == values
            assert parts[0]["prompt_logprobs"] == choice["prompt_logprobs"]
            assert len(choice["prompt_logprobs"]) in (45, 50)
        chat = {"messages": long, "prompt_logprobs": 0, "return_token_ids": True, **more}
        whole, *chunks = ok(engine, CHAT, **chat), *ok(engine, CHAT, stream=True, **chat)[:-1]
        for name in ("prompt_logprobs", "prompt_token_ids"):
            assert chunks[0][name] == whole[name] and len(whole[name]) > 50
            assert not any(name in chunk for chunk in chunks[1:])


def test_a_prefix_that_was_computed_is_reported(engine: AsyncLLM) -> None:
    body = {"prompt": list(range(1, 100)), "max_tokens": 1, "cache_salt": "counted"}
    cached = [ok(engine, COMPLETIONS, **body)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert cached == [0, 96]
    other = ok(engine, COMPLETIONS, **{**body, "cache_salt": "b"})
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_echo_has_the_prompts_logprobs(engine: AsyncLLM, offline: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, logprobs=1)
    (expected,) = offline.generate("hello", params, use_tqdm=False)
    (choice,) = ok(engine, COMPLETIONS, prompt="hello", echo=True, max_tokens=2, logprobs=1, temperature=0)["choices"]
    assert choice["text"] == "hello" + expected.outputs[0].text
    scored = expected.prompt_logprobs or []
    found = [at[token].logprob for at, token in zip(scored[1:], expected.prompt_token_ids[1:], strict=True) if at]
    assert choice["logprobs"]["token_logprobs"][: len(found) + 1] == [None, *found]
    assert choice["logprobs"]["tokens"][:5] == list("hello") and choice["logprobs"]["text_offset"][:6] == list(range(6))


def test_echo_repeats_a_text_as_it_was_given(engine: AsyncLLM) -> None:
    text = f"hello{END_TEXT} there"
    body = {"echo": True, "max_tokens": 1, "logit_bias": {"65": 100}, "temperature": 0}
    assert ok(engine, COMPLETIONS, prompt=text, **body)["choices"][0]["text"] == f"{text}A"
    parts = ok(engine, COMPLETIONS, prompt=[text, "b"], stream=True, **body)[:-1]
    assert sorted(choice["text"] for part in parts for choice in part["choices"]) == ["bA", f"{text}A"]
    tokens = ok(engine, "/tokenize", prompt=text)["tokens"]
    assert ok(engine, COMPLETIONS, prompt=tokens, **body)["choices"][0]["text"] == "hello thereA"
    for as_ids in (False, True):  # the tokens are the bytes, and one that is not shown
        (choice,) = ok(
            engine,
            COMPLETIONS,
            prompt=[*b"h\xc3\xa9", *tokens[5:6]],
            return_tokens_as_token_ids=as_ids,
            logprobs=0,
            **body,
        )["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == ("héA", [0, 1, 1, 2, 2])
    shown = ok(engine, COMPLETIONS, prompt=tokens, skip_special_tokens=False, **body)["choices"][0]["text"]
    assert shown == f"{text}A"
    cut = ok(engine, COMPLETIONS, prompt=text, truncate_prompt_tokens=3, **body)["choices"][0]["text"]
    assert cut == "ereA"


def test_an_echo_needs_no_logprobs_to_generate_nothing(engine: AsyncLLM) -> None:
    answer = ok(engine, COMPLETIONS, prompt="hello", echo=True, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "hello" and choice["logprobs"] is None and "prompt_logprobs" not in choice
    assert answer["usage"]["completion_tokens"] == 0


def test_special_tokens_are_added_as_asked(recommending: AsyncLLM) -> None:
    """By default to texts, and not to what a chat template makes, which has its own."""
    (first,) = ok(recommending, "/tokenize", prompt="")["tokens"]
    assert ok(recommending, "/tokenize", prompt="", add_special_tokens=False)["tokens"] == []
    assert ok(recommending, COMPLETIONS, prompt="", max_tokens=1)["usage"]["prompt_tokens"] == 1
    assert "empty" in error(recommending, COMPLETIONS, {"prompt": "", "add_special_tokens": False})["message"]
    (choice,) = ok(recommending, COMPLETIONS, prompt="hé", echo=True, logprobs=0, max_tokens=1)["choices"]
    assert choice["text"].startswith("hé") and choice["logprobs"]["tokens"][:3] == [END_TEXT, "h", "é"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2], "the text does not have it"
    plain = ok(recommending, "/tokenize", messages=HELLO)["tokens"]
    assert plain[0] != first
    assert ok(recommending, "/tokenize", messages=HELLO, add_special_tokens=True)["tokens"] == [first, *plain]
    for more, number in (({}, 0), ({"add_special_tokens": False}, 0), ({"add_special_tokens": True}, 1)):
        usage = ok(recommending, CHAT, messages=HELLO, max_tokens=1, **more)["usage"]
        assert usage["prompt_tokens"] == len(plain) + number


def test_without_a_limit_the_checkpoint_recommends_one(recommending: AsyncLLM) -> None:
    body = {"ignore_eos": True, "seed": 1}
    for path, prompt, limits, number in (
        (CHAT, {"messages": HELLO}, {}, 3),
        (CHAT, {"messages": HELLO}, {"max_tokens": 5}, 5),
        (CHAT, {"messages": HELLO}, {"max_completion_tokens": 5, "max_tokens": 6}, 5),
        (COMPLETIONS, {"prompt": "a"}, {"max_tokens": None}, 3),
        (COMPLETIONS, {"prompt": "a"}, {}, 16),
    ):
        assert ok(recommending, path, **prompt, **limits, **body)["usage"]["completion_tokens"] == number


def test_more_tokens_than_the_model_has_positions_end_by_length(engine: AsyncLLM) -> None:
    answer = ok(engine, COMPLETIONS, prompt=[1] * 1020, max_tokens=10**9, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["total_tokens"] == 1024


def test_other_fields_reach_the_engine(engine: AsyncLLM) -> None:
    biased = ok(engine, COMPLETIONS, prompt="a", max_tokens=3, logit_bias={"65": 100}, temperature=0)
    assert biased["choices"][0]["text"] == "AAA"
    beams = ok(engine, COMPLETIONS, prompt="a", max_tokens=3, n=2, use_beam_search=True)
    assert len(beams["choices"]) == 2
    scored = ok(engine, CHAT, messages=HELLO, max_tokens=1, prompt_logprobs=1)
    assert scored["prompt_logprobs"][0] is None and len(scored["prompt_logprobs"][1]) >= 1
    assert ok(engine, CHAT, messages=HELLO, max_completion_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2
    ids = ok(engine, COMPLETIONS, prompt="a", max_tokens=1, logprobs=0, return_tokens_as_token_ids=True)
    assert ids["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    assert ok(engine, CHAT, messages=HELLO, max_tokens=1, **harmless)["choices"]
    assert ok(engine, CHAT, messages=HELLO, max_tokens=1, model="alias", request_id="mine")["id"] == "chatcmpl-mine"
    open_end = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The"}]
    prompt = {"messages": open_end, "continue_final_message": True, "add_generation_prompt": False}
    tokens = ok(engine, "/tokenize", **prompt)["tokens"]
    assert bytes(tokens).decode() == "<user>q<assistant>The"


END = {"stop_token_ids": [298]}  # the checkpoint names no end token
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}, "age": {"enum": [1, 20, 300]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_answers_fit_a_schema(engine: AsyncLLM) -> None:
    schema = {"name": "person", "schema": PERSON, "strict": True}
    for structure in (
        {"response_format": {"type": "json_schema", "json_schema": schema}},
        {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}},
    ):
        body = {"messages": HELLO, "max_tokens": 200, "seed": 1, "temperature": 0, **structure, **END}
        body["logit_bias"] = {str(space): -100 for space in b" \t\r\n"}  # random weights may write spaces for ever
        (choice,) = ok(engine, CHAT, **body)["choices"]
        person = json.loads(choice["message"]["content"])
        assert person["name"] in ("Ann", "Bo") and person["age"] in (1, 20, 300) and choice["finish_reason"] == "stop"
        parts = [part for chunk in ok(engine, CHAT, **body, stream=True)[:-1] for part in chunk["choices"]]
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]


def test_scoring_a_prompt_generates_nothing(engine: AsyncLLM) -> None:
    for more in ({}, {"stream": True}):
        answer = ok(engine, COMPLETIONS, prompt="hello", echo=True, max_tokens=0, logprobs=1, **more)
        parts = answer[:-1] if more else [answer]
        choices = [choice for part in parts for choice in part["choices"]]
        assert "".join(choice["text"] for choice in choices) == "hello"
        assert sum(len(choice["logprobs"]["token_logprobs"]) for choice in choices) == 5
    assert "prompt_logprobs" in error(engine, COMPLETIONS, {"prompt": "a", "max_tokens": 0})["message"]
    cut = ok(engine, COMPLETIONS, prompt="hello", max_tokens=1, truncate_prompt_tokens=2)
    assert cut["usage"]["prompt_tokens"] == 2
    allowed = ok(engine, COMPLETIONS, prompt="hello", max_tokens=3, allowed_token_ids=[66])
    assert allowed["choices"][0]["text"] == "BBB"


def test_tokenize_and_detokenize(engine: AsyncLLM, offline: LLM) -> None:
    answer = ok(engine, "/tokenize", prompt="the 日本", return_token_strs=True)
    assert answer["tokens"] == offline.engine.check_prompt("the 日本", None)
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 1024
    assert answer["token_strs"] == ["th", "e", "Ġ", "æĹ¥æľ¬"], "as the vocabulary has them"
    assert ok(engine, "/detokenize", tokens=answer["tokens"])["prompt"] == "the 日本"
    assert ok(engine, "/tokenize", prompt="")["tokens"] == []
    assert "not one of the model's" in error(engine, "/detokenize", {"tokens": [300]})["message"]
    assert error(engine, "/tokenize", {})["param"] == "prompt"


def test_models_health_and_version(engine: AsyncLLM) -> None:
    listed = ask(engine, "/v1/models").json()
    assert [card["id"] for card in listed["data"]] == [NAME, "alias"] and listed["data"][0]["max_model_len"] == 1024
    assert ask(engine, f"/v1/models/{NAME}").json()["id"] == NAME
    assert error(engine, "/v1/models/other", None, 404)["code"] == "model_not_found"
    assert ask(engine, "/health").json() == {"status": "ok"}
    assert ask(engine, "/version").json()["version"]


def test_metrics(engine: AsyncLLM) -> None:
    def counted() -> dict[str, float]:
        lines = ask(engine, "/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    before = counted()
    for _ in range(2):
        ok(engine, COMPLETIONS, prompt="count me", max_tokens=4, ignore_eos=True)

    async def leave() -> None:
        stream = await engine.add([1], SamplingParams(max_tokens=500, ignore_eos=True))
        await anext(stream)
        stream.close()

    with held_steps(engine):
        run_async(leave())
    assert nothing_left(engine)
    metrics = counted()

    def grown(name: str, more: str = "") -> float:
        label = f'{name}{{engine="0"{more},model_name="{NAME}"}}'
        return metrics[label] - before[label]

    assert grown("vllm:request_success_total", ',finished_reason="length"') == 2
    assert grown("vllm:request_success_total", ',finished_reason="abort"') == 1, "clients that went away count"
    assert 8 < grown("vllm:generation_tokens_total") < 8 + 500
    assert grown("vllm:time_to_first_token_seconds_bucket", ',le="+Inf"') == 3
    assert grown("vllm:time_to_first_token_seconds_count") == 3 and grown("vllm:time_to_first_token_seconds_sum") > 0
    text = ask(engine, "/metrics").text
    for name in (
        'nanovllm:kv_transfer_bytes_total{direction="h2d"',
        "vllm:kv_cache_usage_perc",
        "kv_link_bytes_per",
        "nanovllm:loaded_weight_bytes_total{",
        "nanovllm:read_weight_bytes_total{",
    ):
        assert name in text


# ---- errors

REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", "at least 0"),
    (COMPLETIONS, {"prompt": "a", "n": 2, "temperature": 0}, "n", "greedy"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "Cannot request more than 20"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias.x.[key]", "integer"),
    (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature", "did you mean 'temperature'"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regx": "a"}}, "", "did you mean 'regex'"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream_options", "stream=true"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": [999]}, "prompt", "999"),
    (COMPLETIONS, {"prompt": []}, "prompt", "0 prompts"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "valid"),
    (COMPLETIONS, {}, "prompt", "required"),
    (CHAT, {"messages": []}, "messages", "at least 1"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role", "missing"),
    (CHAT, {"messages": [{"role": "alien", "content": "x"}]}, "messages", "no role alien"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content.0",
        "'type': 'text'",
    ),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [1] * 9}]}, "messages.0.tool_calls.0.function", "got 1"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "logprobs=true"),
    (CHAT, {"messages": HELLO, "chat_template": "x"}, "chat_template", "no templates from requests"),
    (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens", "prompt_logprobs"),
    (CHAT, {"messages": HELLO, "tool_choice": "auto"}, "tool_choice", "needs tools"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format", "schema"),
]


def test_refusals_name_the_parameter(engine: AsyncLLM) -> None:
    for path, body, param, words in REFUSED:
        found = error(engine, path, body)
        assert (found["param"] or "") == param and words in found["message"], found
        assert found["type"] == "invalid_request_error"


def test_of_many_errors_a_body_makes_few() -> None:
    """A million of them, which a body has room for, would hold up all other requests for a minute."""
    wrong: list[int] = [1] * 2000
    for body in (
        {"messages": wrong},
        *({"messages": HELLO, name: wrong} for name in ("tools", "documents", "modalities", "stop", "bad_words")),
    ):
        with pytest.raises(ValidationError) as refused:
            ChatRequest.read(json.dumps(body).encode())
        assert refused.value.error_count() <= 3, list(body)


def test_many_wrong_fields_are_counted(engine: AsyncLLM) -> None:
    wrong = {f"x{i}": 1 for i in range(2000)}
    for more in (wrong, {"logit_bias": wrong}):
        found = error(engine, CHAT, {"messages": HELLO, **more})
        assert found["message"].startswith("the body has 2,000 wrong or unknown fields")


def test_more_prompts_than_may_ever_wait_are_no_matter_of_time(engine: AsyncLLM) -> None:
    assert "must hold 1 to 3" in error(engine, COMPLETIONS, {"prompt": ["a"] * 4}, max_queue=3)["message"]


def test_unknown_paths_methods_models_and_types(engine: AsyncLLM) -> None:
    assert error(engine, "/v2", None, 404)["message"] == "GET /v2: Not Found"
    assert ask(engine, CHAT).headers["allow"] == "POST"
    assert error(engine, CHAT, {"model": "gpt", "messages": HELLO}, 404)["code"] == "model_not_found"
    error(engine, CHAT, b"{}", 415, headers={"content-type": "text/plain"})


def test_a_failed_step_is_an_error_500_without_internals(model: str) -> None:
    with AsyncLLM(model, **CACHE) as engine:
        failing_steps(engine, 2)
        found = error(engine, COMPLETIONS, {"prompt": "a"}, 500)
        assert "device is lost" not in str(found) and found["code"] == "engine_error"
        *_, streamed = ok(engine, COMPLETIONS, prompt="a", stream=True)
        assert streamed["error"]["code"] == "engine_error"
        assert ok(engine, COMPLETIONS, prompt="a", max_tokens=1)["choices"], "the engine goes on"
        failing_steps(engine, 100)
        for _ in range(3):
            error(engine, COMPLETIONS, {"prompt": "a"}, 500)
        assert error(engine, COMPLETIONS, {"prompt": "a"}, 503)["code"] == "engine_error"
        health = ask(engine, "/health")
        assert health.status_code == 503 and health.json()["status"] == "error"


def test_one_bad_prompt_of_several_refuses_the_request_and_leaves_nothing(engine: AsyncLLM) -> None:
    error(engine, COMPLETIONS, {"prompt": [[1], [2], [4000], [3]], "max_tokens": 500})
    assert nothing_left(engine)


# A grammar of so many readings that its matcher gives up after the first token.
AMBIGUOUS = {"grammar": f'start: {"a? " * 4000}\na: "x"\n'}


def test_a_requests_own_error_reaches_its_client_and_the_log(
    engine: AsyncLLM, offline: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """As 4xx, since clients send again by themselves what is answered 500."""
    grammar = StructuredOutputsParams(**AMBIGUOUS)
    params = SamplingParams(max_tokens=9, min_tokens=9, stop_token_ids=[1], structured_outputs=grammar)
    (failed,) = offline.generate(["a"], params, use_tqdm=False)
    assert failed.error is not None and "Parser Error: " in failed.error and not failed.step_failed
    body = {"prompt": "a", "max_tokens": 9, "min_tokens": 9, "stop_token_ids": [1], "structured_outputs": AMBIGUOUS}
    found = error(engine, COMPLETIONS, body)
    assert failed.error in found["message"] and found["code"] == "request_failed"
    chat = {"messages": HELLO, "max_tokens": 9, "min_tokens": 9, "stop_token_ids": [1], "structured_outputs": AMBIGUOUS}
    *_, last = ok(engine, CHAT, **chat, stream=True)
    assert "Parser Error: " in last["error"]["message"] and last["error"]["code"] == "request_failed"
    logged = [record.getMessage() for record in caplog.records if record.name == "nanovllm.apps.server.serving"]
    assert len(logged) == 2 and all("Parser Error: " in line for line in logged)
    assert nothing_left(engine)
