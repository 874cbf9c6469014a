"""An answer that a client sends back becomes the text that the model wrote, so that the prefix cache finds it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from conversations import TEMPLATES
from test_server_tools import joined, output
from tokenizer_files import byte_level_tokenizer

from nanovllm.apps.server.chat import Messages
from nanovllm.apps.server.protocol import ChatRequest
from nanovllm.apps.tool_calls.reading import Formats
from nanovllm.text.chat_template import ChatTemplate
from nanovllm.text.tokenizer import HuggingFaceTokenizer

ASKED = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "How is the weather?"}]
CITY = {"type": "string", "description": "where"}
DEEP = {"type": "boolean", "description": "or not"}
PARAMETERS = {"type": "object", "properties": {"city": CITY, "deep": DEEP}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS}}
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
DEEP_XML = "<tool_call>\n<function=weather>\n<parameter=deep>\n"
DEEP_END = "\n</parameter>\n</function>\n</tool_call>"
MINIMAX = '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n</invoke>\n'
SEED = "<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>"
GLM = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
GEMMA = '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>'
MISTRAL = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]'
ANALYSIS = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
COMMENTARY = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}'


class Written(NamedTuple):
    """What a model writes after a template's prompt. again: the end of it that the template writes otherwise."""

    template: str
    text: str
    again: str = ""


ANSWERS = [
    Written("qwen2_5", HERMES),
    Written("qwen2_5", f"I look.\n{HERMES}"),
    Written("qwen2_5", f"I look.\n\n{HERMES}\n{HERMES}"),
    Written("qwen3", HERMES),
    Written("qwen3", f"<think>\nSo.\n</think>\n\n{HERMES}"),
    Written("qwen3", f"<think>\nSo.\n</think>\n\nI look.\n{HERMES}"),
    Written("qwen3", HERMES.replace('{"city": "Oslo"}', '{"city":"Oslo",  "share": 1.50, "deep": 1e3}')),
    Written("qwen3_5", f"So.\n</think>\n\n{XML}"),
    Written("qwen3_5", f"So.\n</think>\n\nI look.\n\n{XML}\n{XML}"),
    Written("qwen3_coder", XML),
    Written("qwen3_coder", f"I look.\n\n{XML}"),
    Written("qwen3_coder", f"{DEEP_XML}True{DEEP_END}"),
    Written("nemotron3", f"So.\n</think>\n{XML}\n"),
    Written("nemotron3", f"So.\n</think>\nI look.\n{XML}\n"),
    Written("nemotron3", "So.\n</think>\nRain."),
    Written("minimax_m2", f"So.\n</think>\n\n\n{MINIMAX}</minimax:tool_call>"),
    Written("minimax_m2", f"So.\n</think>\n\nI look.\n{MINIMAX}</minimax:tool_call>"),
    Written("minimax_m2", "So.\n</think>\n\nRain."),
    Written("glm4_5", f"\n<think>So.</think>\n{GLM}"),
    Written("glm4_5", f"\n<think></think>\nI look.\n{GLM}"),
    Written("seed_oss", f"<seed:think>So.</seed:think>\n{SEED}"),
    Written("seed_oss", f"<seed:think>So.</seed:think>\nI look.\n\n{SEED}"),
    Written("llama3_2", '{"name": "weather", "parameters": {"city": "Oslo"}}'),
    Written("llama4_pythonic", '[weather(city="Oslo")]'),
    Written("mistral_args", 'I look.[TOOL_CALLS]weather[ARGS]{"city":"Oslo"}'),
    Written("gemma4", GEMMA),
    Written("olmo3", "<function_calls>\nweather(city='Oslo')\n</function_calls>"),
    # The templates write a call in another way than models, or leave what was said before it out.
    Written("gpt_oss", ANALYSIS + COMMENTARY, again=COMMENTARY),
    Written("gpt_oss", ANALYSIS + PREAMBLE + COMMENTARY, again=f"<|end|><|start|>assistant{PREAMBLE}{COMMENTARY}"),
    Written("llama3_2", '{"name": "weather", "parameters": {"city":"Oslo"}}', again='"Oslo"}}'),
    Written("qwen3_coder", f"{DEEP_XML}true{DEEP_END}", again=f"true{DEEP_END}"),
    Written("olmo3", '<function_calls>\nweather(city="Oslo")\n</function_calls>', again='"Oslo")\n</function_calls>'),
    Written("mistral_small", f"I look.{MISTRAL}", again=f"I look.{MISTRAL}"),
    Written("gemma4", f"I look.{GEMMA}", again=f"I look.{GEMMA}"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def sent_back(text: str, template: str, tokenizer: HuggingFaceTokenizer, streams: bool) -> dict[str, Any]:
    """The message that a client has of an answer."""
    formats = Formats(tokenizer)
    body = ChatRequest.model_validate({"messages": ASKED, "tools": [TOOL], "stream": streams})
    messages = Messages(body, formats.reading(formats.shown(template).form, [TOOL]))
    if not streams:
        (choice,) = messages.complete([output(text, "stop")])["choices"]
        return dict(choice["message"])
    parts = [(letter, None) for letter in text[:-1]] + [(text[-1], "stop")]
    whole = joined(
        [choice for part in parts for chunk in messages.chunks(0, output(*part)) for choice in chunk["choices"]]
    )
    calls = [{"id": f"call{i:05}", "type": "function", "function": call} for i, call in enumerate(whole["tool_calls"])]
    return {"role": "assistant", **whole, "tool_calls": calls, "reasoning": whole["reasoning"] or None}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", ANSWERS, ids=lambda case: case.template)
def test_an_answer_is_what_the_model_wrote(case: Written, streams: bool, tokenizer: HuggingFaceTokenizer) -> None:
    text = (TEMPLATES / f"{case.template}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(tokenizer, text, tools=[TOOL])
    answer = sent_back(case.text, text, tokenizer, streams)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in answer.get("tool_calls", ())]
    (asked,) = template.prompts(ASKED)
    (now,) = template.prompts([*ASKED, answer, *results])
    assert asked.text is not None and now.text is not None
    same = case.text[: len(case.text) - len(case.again)]
    assert now.text.startswith(asked.text + same)
    rest = now.text.removeprefix(asked.text + same)
    assert not case.again or rest[0] != case.again[0]


@pytest.mark.parametrize("name", ["minimax_m2", "nemotron3", "qwen3_5"])
def test_a_thought_may_be_a_part_of_the_content_or_a_field(name: str, tokenizer: HuggingFaceTokenizer) -> None:
    """With the tag before it, as some clients complete it, and without, as the model writes it."""
    text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(tokenizer, text, add_generation_prompt=False)
    said = {"role": "assistant", "content": "Rain."}
    whole = template.prompts([*ASKED, {**said, "reasoning": "So."}])
    joint = "\n" if name == "nemotron3" else "\n\n"
    for content in (f"So.\n</think>{joint}Rain.", f"<think>\nSo.\n</think>{joint}Rain."):
        for given in (content, [{"type": "text", "text": content}], [content]):
            assert template.prompts([*ASKED, {**said, "content": given}]) == whole
    kept = template.prompts([*ASKED, {**said, "content": "A </think> B.", "reasoning": "So."}])
    assert kept[0].text is not None and kept[0].text.count("</think>") == 2, "the content of an answer with reasoning"
