"""The offline face: vLLM's basic scripts, conversations, streams, refusals by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint_fixture, edit_config, make_checkpoint
from tokenizer_files import CHAT_TEMPLATE, END, write_byte_level

from nanovllm import LLM, RequestOutputKind, SamplingParams
from nanovllm.errors import RequestError

VOCAB = 300
CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write an essay about the importance of higher education."},
]
RENDERED = "".join(f"<{message['role']}>{message['content']}\n" for message in CONVERSATION) + "<assistant>"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


model_dir = checkpoint_fixture(vocab=VOCAB, max_positions=4200, tokenizer={"chat_template": CHAT_TEMPLATE})


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    with LLM(model=str(model_dir), dtype="float32", num_gpu_blocks=80, kvcache_block_size=64) as made:
        yield made


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Without a tokenizer."""
    path = tmp_path_factory.mktemp("bare")
    make_checkpoint(path, vocab=VOCAB)
    with LLM(path, num_gpu_blocks=16) as made:
        yield made


# ---- vLLM's scripts for offline use, in short


def test_prompts_in_all_forms(llm: LLM) -> None:
    texts = ["Hello", "one two"]
    by_text = llm.generate(texts, GREEDY, use_tqdm=False)
    ids = [llm.get_tokenizer().encode(text) for text in texts]
    for prompts in (ids, [{"prompt_token_ids": tokens} for tokens in ids], [{"prompt": text} for text in texts]):
        outputs = llm.generate(prompts, [GREEDY, GREEDY], use_tqdm=False, lora_request=None)
        assert [out.outputs[0].text for out in outputs] == [out.outputs[0].text for out in by_text]


def test_the_chat_script(llm: LLM) -> None:
    (output,) = llm.chat(CONVERSATION, GREEDY, use_tqdm=False)
    assert output.prompt == RENDERED
    assert output.prompt_token_ids == llm.get_tokenizer().encode(RENDERED, add_special_tokens=False)
    (by_text,) = llm.generate(RENDERED, GREEDY, use_tqdm=False)
    assert output.outputs[0].text == by_text.outputs[0].text
    many = llm.chat([CONVERSATION for _ in range(10)], GREEDY, use_tqdm=True)
    assert [output.outputs[0].text for output in many] == [by_text.outputs[0].text] * 10


# ---- conversations


def test_what_a_template_is_given(llm: LLM) -> None:
    def prompt(**options: Any) -> str | None:
        messages = options.pop("messages", CONVERSATION[1:2])
        return llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False, **options)[0].prompt

    assert prompt() == "<user>Hello\n<assistant>"
    assert prompt(add_generation_prompt=False) == "<user>Hello\n"
    assert prompt(tools=[{"type": "function", "function": {"name": "f"}}]) == "<user>Hello\n[1 tools]<assistant>"
    assert prompt(chat_template_kwargs={"shout": True}) == "<user>Hello\n!<assistant>"
    begun = [*CONVERSATION[1:2], {"role": "assistant", "content": "Well"}]
    continued = prompt(messages=begun, add_generation_prompt=False, continue_final_message=True)
    assert continued == "<user>Hello\n<assistant>Well"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert prompt(messages=parts) == "<user>a\nb\n<assistant>"
    assert llm.chat([], GREEDY, use_tqdm=False) == []


def test_special_tokens_of_the_template_are_read_and_none_are_added(llm: LLM) -> None:
    (output,) = llm.chat(CONVERSATION[1:2], GREEDY, False, chat_template=END + "{{ messages[0].content }}" + END)
    end = llm.get_tokenizer().convert_tokens_to_ids(END)
    assert output.prompt_token_ids == [end, *llm.get_tokenizer().encode("Hello"), end]


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
BAD_CHATS: list[tuple[Any, dict[str, Any], str]] = [
    ("Hello", {}, "messages must be a list.*'Hello'"),
    ([["Hello"]], {}, "messages.0.0 must be an object with a role and a content, got 'Hello'"),
    ([[]], {}, "at least one message"),
    ([{"role": "user", "content": 5}], {}, "messages.0.content must be text or a list of text parts, got 5"),
    ([IMAGE], {}, "messages.0.content.0 must be a part of text.*image_url"),
    ([{"role": "pirate", "content": "Arr"}], {}, "the chat template cannot take the messages: unknown role"),
    (CONVERSATION, {"chat_template": "{% for"}, "the chat template cannot take the messages: "),
    (CONVERSATION, {"chat_template": 5}, "chat_template=5: must be the text"),
    (CONVERSATION, {"continue_final_message": True}, "continue_final_message=True: needs add_generation_prompt=False"),
    (CONVERSATION, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs='tokenize': must hold"),
    ([CONVERSATION] * 2, {"sampling_params": [GREEDY]}, "2 prompts and 1 sampling_params"),
]


def test_conversations_that_are_refused(llm: LLM) -> None:
    for messages, options, says in BAD_CHATS:
        with pytest.raises(RequestError, match=says) as refusal:
            llm.chat(messages, use_tqdm=False, **options)
        assert "\n" not in str(refusal.value) and not llm.engine.has_unfinished_requests()


def test_without_tokenizer_or_template(bare: LLM, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no tokenizer files, so messages cannot be read"):
        bare.chat(CONVERSATION)
    with pytest.raises(RequestError, match="no tokenizer files"):
        bare.get_tokenizer()
    with pytest.raises(RequestError, match=r"stop=\['x'\]: needs a tokenizer"):
        bare.generate([[1]], SamplingParams(stop="x"), use_tqdm=False)
    make_checkpoint(tmp_path, vocab=VOCAB)
    write_byte_level(tmp_path)
    with LLM(tmp_path, num_gpu_blocks=8) as plain:
        with pytest.raises(RequestError, match=r"the tokenizer has no chat template.*chat_template"):
            plain.chat(CONVERSATION)
        (output,) = plain.chat(CONVERSATION, GREEDY, False, chat_template="{{ messages[1].content }}")
        assert output.prompt == "Hello"


# ---- arguments


def test_prompts_run_in_the_order_of_their_priorities(model_dir: Path) -> None:
    with LLM(model_dir, max_num_seqs=1, num_gpu_blocks=16) as one_at_a_time:
        prompts = ["a", "b", "c"]
        outputs = one_at_a_time.generate(prompts, GREEDY, use_tqdm=False, priority=[2, 3, 1])
        starts = [output.metrics.first_scheduled_time or 0.0 for output in outputs]
        assert [output.prompt for output in outputs] == prompts
        assert starts[2] < starts[0] < starts[1]
        assert len(one_at_a_time.generate(prompts, GREEDY, use_tqdm=False, priority=1)) == 3
        for priority, says in ([[1]], "3 prompts and 1 priorities"), (["x"], "priority must be a list"):
            with pytest.raises(RequestError, match=says):
                one_at_a_time.generate(prompts, GREEDY, use_tqdm=False, priority=priority[0])
        with pytest.raises(RequestError, match="priority='x'"):
            one_at_a_time.generate(prompts, GREEDY, use_tqdm=False, priority=[1, "x", 2])  # type: ignore[list-item]
        assert not one_at_a_time.engine.has_unfinished_requests()


def test_the_checkpoint_recommends_default_parameters(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, vocab=VOCAB)
    with LLM(tmp_path, num_gpu_blocks=8) as plain:
        assert plain.get_default_sampling_params() == SamplingParams()
    edit_config(tmp_path, "generation_config.json", temperature=0.6, top_k=20, max_new_tokens=3, do_sample=True)
    with LLM(tmp_path, num_gpu_blocks=8) as recommended:
        assert recommended.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=20, max_tokens=3)
        (output,) = recommended.generate([[1, 2]], use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3


# ---- streams


def test_a_stream_gives_outputs_as_they_come(llm: LLM) -> None:
    expected = llm.generate(["Hello", "one two"], GREEDY, use_tqdm=False)
    params = SamplingParams(temperature=0.0, max_tokens=12, output_kind=RequestOutputKind.DELTA)
    texts: dict[str, str] = {}
    num_outputs = 0
    for output in llm.stream(["Hello", "one two"], params):
        num_outputs += 1
        texts[output.request_id] = texts.get(output.request_id, "") + output.outputs[0].text
    assert list(texts.values()) == [output.outputs[0].text for output in expected] and num_outputs == 24


def test_a_bad_stream_is_refused_before_it_is_read(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.stream([[]], GREEDY)


def test_a_stream_that_is_left_aborts_its_requests(llm: LLM) -> None:
    stream = llm.stream(["Hello", "one"], GREEDY)
    assert not llm.engine.has_unfinished_requests(), "nothing is asked for yet"
    next(stream)
    assert llm.engine.has_unfinished_requests()
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_unfinished_requests() and llm.engine.scheduler.block_manager.pool.num_used == 0
    assert next(stream, None) is None, "also not what the step has computed for the other request"
