"""What models write to call tools, in every format, and the pieces that stand for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm.apps.tool_calls.formats import FORMATS
from nanovllm.apps.tool_calls.pieces import Arguments, Call, Ended, Piece, merged

FILE: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "deep": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "more": {"$ref": "#/$defs/more"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "kind": {"enum": ["a", 1]},
    },
    "$defs": {"more": {"type": "object"}},
}
TOOLS: Mapping[str, Mapping[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "write": FILE,
    "now": {},
}
CITY = '{"city": "Paris", "days": 3}'

# A call of weather with Paris and 3, as each format writes it.
CALLS: Mapping[str, str] = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": ' + CITY + "}\n</tool_call>",
    "qwen3_xml": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>"
    "\n</function>\n</seed:tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "mistral": "[TOOL_CALLS]weather[ARGS]" + CITY,
    "gemma4": '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
    "openai": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + CITY + "<|call|>",
    "olmo3": '<function_calls>\nweather(city="Paris", days=3)\n</function_calls>',
    "lfm2": "<|tool_call_start|>[weather(city='Paris', days=3)]<|tool_call_end|>",
    "llama3_json": '{"name": "weather", "parameters": ' + CITY + "}",
    "pythonic": '[weather(city="Paris", days=3)]',
    "phi4_mini_json": 'functools[{"name": "weather", "arguments": ' + CITY + "}]",
}
ALONE = ("llama3_json", "pythonic")  # calls without a mark, which begin an answer


def called(arguments: str = CITY, name: str = "weather") -> list[Piece]:
    """The pieces of a call."""
    return [Call(name), Arguments(arguments), Ended()]


def read(form: str, text: str, size: int = 1 << 20) -> list[Piece]:
    """The pieces of an answer that comes in parts of this size."""
    parser = FORMATS[form].make(TOOLS)
    pieces = [piece for i in range(0, len(text), size) for piece in parser.feed(text[i : i + size])]
    return merged([*pieces, *parser.finish()])
