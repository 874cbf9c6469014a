"""Schemas with whole numbers and constants beyond doubles, as a Lark grammar of which the library's JSON is a part.

The library writes such numbers as others. So the parts of a schema that lead to one become rules, with the number's
text, and what has none is left to the library.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from nanovllm.errors import RequestError, quoted
from nanovllm.features.structured_outputs.numbers import EXACT, all_exact, whole_bounds, whole_pattern
from nanovllm.features.structured_outputs.schemas import (
    is_whole,
    parts_of,
    reached,
    resolved,
    unquoted,
    with_exact_bounds,
    write_json,
)

Schema = dict[str, Any]
CHARACTER = r'([^"\\\x00-\x1f\x7f]|\\(["\\\/bfnrt]|u[0-9a-fA-F]{4}))'
NOTES = {"discriminator", "$defs", "definitions", "$schema", "$id"}
OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
    "boolean": set(),
    "null": set(),
}
COMMA = ' ws "," ws '
COLON = ' ws ":" ws '
OF_TYPE["integer"] = OF_TYPE["number"]


class NotComposedError(Exception):
    """A part that leads to such a number has a keyword for which there is no rule."""


def needs_rules(root: Any) -> bool:
    """Whether a schema has a number that the library does not write as it is."""
    return any(_is_inexact(part) for part in reached(root, root))


def _is_inexact(part: Schema) -> bool:
    if not all_exact([part.get("const"), part.get("enum")]):
        return True
    if not is_whole(part) or "multipleOf" in part:
        return False
    return any(bound is not None and abs(bound) > EXACT for bound in whole_bounds(part))


def _leading(root: Schema) -> set[int]:
    """The ids of the parts that have such a number, or lead to one."""
    parents: dict[int, list[Schema]] = {}
    waiting = []
    for part in reached(root, root):
        if _is_inexact(part):
            waiting.append(part)
        for child in (*parts_of(part), resolved(part, root)):
            parents.setdefault(id(child), []).append(part)
    found: set[int] = set()
    while waiting:
        part = waiting.pop()
        if id(part) not in found:
            found.add(id(part))
            waiting += parents.get(id(part), ())
    return found


class Composer:
    """Writes the grammar of one schema. options: of the library's JSON. is_valid: of an instance and a part."""

    def __init__(self, root: Schema, options: dict[str, Any], is_valid: Callable[[Any, Schema], bool]) -> None:
        self._root = root
        self._options = options
        self._is_valid = is_valid
        self._rules: list[str] = []
        self._leading = _leading(root)
        self._names: dict[int, str] = {}  # of the rules that stand for targets of references

    def grammar(self) -> str:
        """Raises NotComposedError."""
        if any(not is_of_definitions(part["$ref"]) for part in reached(self._root, self._root) if "$ref" in part):
            raise NotComposedError("$ref")
        start = self._value(self._root)
        space = self._options.get("whitespace_pattern")
        text = f"WS: /{_slashed(space)}/\nws: WS?\n" if space else 'ws: ""\n'
        return f"start: ws {start} ws\n{text}" + "\n".join(self._rules)

    def _value(self, schema: Any) -> str:
        """What stands for a value of this schema: a rule's name or an expression in brackets."""
        if id(schema) not in self._leading:
            return self._library(schema)
        effective = schema.keys() - NOTES
        if not all_exact([schema.get("const"), schema.get("enum")]):
            return self._constants(schema)
        if effective == {"$ref"}:
            return self._reference(schema)
        for name in ("anyOf", "allOf"):
            options = schema.get(name)
            if effective == {name} and isinstance(options, list) and (name == "anyOf" or len(options) == 1):
                return self._rule(" | ".join(map(self._value, options)))
        types = schema.get("type", list(OF_TYPE.keys() - {"integer"}))
        types = [types] if isinstance(types, str) else types
        known = {"type"}.union(*OF_TYPE.values())
        if effective - known:
            raise NotComposedError(min(effective - known))
        return self._rule(" | ".join(self._typed(schema, kind) for kind in types))

    def _typed(self, schema: Schema, kind: str) -> str:
        own = {name: part for name, part in schema.items() if name in OF_TYPE[kind]} | {"type": kind}
        if not _is_inexact(own) and not any(id(part) in self._leading for part in parts_of(own)):
            return self._library(own)
        if kind == "integer":
            return self._terminal(f"/{whole_pattern(*whole_bounds(own))}/")
        return self._object(own) if kind == "object" else self._array(own)

    def _reference(self, schema: Schema) -> str:
        target = resolved(schema, self._root)
        if id(target) not in self._names:
            self._names[id(target)] = name = self._new("ref")
            self._rules.append(f"{name}: {self._value(target)}")
        return self._names[id(target)]

    def _constants(self, schema: Schema) -> str:
        rest = {name: part for name, part in schema.items() if name not in ("enum", "const")}
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if "enum" in schema and "const" in schema:
            rest["const"] = schema["const"]
        kept = [value for value in values if self._is_valid(value, rest)]
        if not kept:
            raise RequestError(f"enum={quoted(values)}: none of them matches what stands beside it")
        return self._rule(" | ".join(map(self._constant, kept)))

    def _constant(self, value: Any) -> str:
        if isinstance(value, dict):
            members = [f"{_text(name)}{COLON}{self._constant(part)}" for name, part in value.items()]
            return self._listed("{", members, "}")
        if isinstance(value, list):
            return self._listed("[", list(map(self._constant, value)), "]")
        return _quoted(write_json(value))

    def _listed(self, opens: str, items: list[str], closes: str) -> str:
        return f"{_quoted(opens)} ws {COMMA.join(items)} ws {_quoted(closes)}"

    def _array(self, schema: Schema) -> str:
        first = schema.get("prefixItems", [])
        others = schema.get("items", True)
        least = int(schema.get("minItems", 0))
        most = schema.get("maxItems")
        most = len(first) if others is False else most
        tail = ""
        if most is None or most > len(first):
            item = self._value(others)
            low = max(least - len(first), 0)
            high = "" if most is None else int(most) - len(first)
            tail = f"({COMMA}{item}){{{low},{high}}}"
            if not first:
                low = max(least - 1, 0)
                high = "" if most is None else int(most) - 1
                tail = f"{item} ({COMMA}{item}){{{low},{high}}}"
                return self._rule(f'"[" ws {tail if least else f"({tail})?"} ws "]"')
        for index in reversed(range(len(first) if most is None else min(len(first), int(most)))):
            tail = f"{COMMA if index else ''}{self._value(first[index])} {tail}"
            if index >= least:
                tail = f"({tail})?"
        return self._rule(f'"[" ws {tail} ws "]"')

    def _object(self, schema: Schema) -> str:
        named = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        required = schema.get("required", [])
        members = [(name, part) for name, part in named.items() if part is not False or name in required]
        members += [(name, others) for name in required if name not in named]
        if any(part is False for _, part in members):
            raise RequestError(f"required={quoted(required)}: a property that is required is not allowed")
        more = ""
        if others is not False:
            more = f"{self._other_name([name for name, _ in members])}{COLON}{self._value(others)}"
        rest = f"({COMMA}{more})*" if more else ""
        start = f"({more} {rest})?" if more else ""
        for name, part in reversed(members):
            member = f"{_text(name)}{COLON}{self._value(part)}"
            if name in required:
                rest, start = f"{COMMA}{member} {rest}", f"{member} {rest}"
            else:
                start = f"({member} {rest} | {start})" if start else f"({member} {rest})?"
                rest = f"({COMMA}{member})? {rest}"
            rest = self._rule(rest)
            start = self._rule(start)
        return self._rule(f'"{{" ws {start} ws "}}"')

    def _other_name(self, names: list[str]) -> str:
        taken = " | ".join(_text(name) for name in names)
        text = rf'/"{CHARACTER}*"/'
        return self._terminal(f"{text} & ~({taken})" if taken else text)

    def _library(self, schema: Any) -> str:
        """A rule that leaves a schema to the library."""
        if not isinstance(schema, dict):
            schema = {} if schema is not False else {"enum": []}
        kept = {name: part for name, part in schema.items() if name not in ("$defs", "definitions", "$schema")}
        references = [part["$ref"].split("/") for part in reached(schema, self._root) if "$ref" in part]
        for _, group, name, *_ in references:  # all are of definitions
            name = unquoted(name)
            kept.setdefault(group, {})[name] = self._root[group][name]
        kept = with_exact_bounds(json_copy(kept))
        return self._rule(f"%json {write_json(kept | {'x-guidance': self._options})}")

    def _rule(self, expression: str) -> str:
        if not expression.strip():
            return ""
        name = self._new("rule")
        self._rules.append(f"{name}: {expression}")
        return name

    def _terminal(self, expression: str) -> str:
        name = self._new("TEXT")
        self._rules.append(f"{name}: {expression}")
        return name

    def _new(self, kind: str) -> str:
        return f"{kind}_{len(self._rules)}_{len(self._names)}"


def json_copy(value: Any) -> Any:
    """A copy of JSON in which no part is the same object as another."""
    if isinstance(value, dict):
        return {name: json_copy(part) for name, part in value.items()}
    return [json_copy(part) for part in value] if isinstance(value, list) else value


def is_of_definitions(reference: str) -> bool:
    return reference.startswith(("#/$defs/", "#/definitions/"))


def _text(value: str) -> str:
    """A name of a property in Lark."""
    return _quoted(json.dumps(value, ensure_ascii=False))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _slashed(pattern: str) -> str:
    return pattern.replace("/", "\\/")
