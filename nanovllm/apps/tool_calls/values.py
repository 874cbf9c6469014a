"""Values of calls that are written as text, with the types that the tool's JSON schema gives them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

INTEGER = re.compile(r"-?(?:0|[1-9]\d*)", re.ASCII)
WHOLE = re.compile(r"(-?(?:0|[1-9]\d*))\.0+", re.ASCII)
KINDS: Mapping[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def dumped(value: Any) -> str:
    """Strict JSON, or ValueError."""
    return encodable(json.dumps(value, ensure_ascii=False, allow_nan=False))


def encodable(text: str) -> str:
    """JSON in which half of a surrogate pair, which JSON escapes and which is no character, is an escape again."""
    return text.encode("utf-8", "backslashreplace").decode()


def escaped(text: str) -> str:
    """The text as it stands within a JSON string."""
    return dumped(text)[1:-1]


def loaded(text: str) -> Any:
    """The value of strict JSON. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_no_json)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _no_json(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def property_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """JSON Schema's names of the types that a property may have; of one that the schema does not describe, string."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        described = properties[name]
    else:
        described = schema.get("additionalProperties")
        if not isinstance(described, Mapping) or not described:
            return frozenset({"string"})
    return frozenset(_types(described, schema, set()) or _ALL)


_ALL = ("null", "boolean", "integer", "number", "object", "array", "string")


def _types(schema: Any, root: Mapping[str, Any], seen: set[str]) -> set[str]:
    """Empty if the schema says nothing of types. seen: the references that were followed, each once."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    types = {str(name) for name in (kind if isinstance(kind, list) else [kind]) if name is not None}
    if not types and isinstance(schema.get("enum"), list):
        types = {_type_of(value) for value in schema["enum"]}
    if not types and "const" in schema:
        types = {_type_of(schema["const"])}
    for union in ("anyOf", "oneOf"):
        for choice in schema[union] if isinstance(schema.get(union), list) and kind is None else ():
            types |= _types(choice, root, seen)
    reference = schema.get("$ref")
    if not types and isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        types = _types(_referred(reference, root), root, seen)
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) and not types else ():
        types = types or _types(part, root, seen)
    if not types:
        types = {"object"} if "properties" in schema else {"array"} if "items" in schema else set()
    return types | {"null"} if types and schema.get("nullable") is True else types


def _type_of(value: Any) -> str:
    return KINDS.get(type(value), "object" if isinstance(value, dict) else "array")


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of the schema that a reference like #/$defs/name stands for; None if there is none."""
    part: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        part = part.get(name) if isinstance(part, Mapping) else None
    return part


def typed(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that is written as text. Text that fits none of the types is a string, unchanged."""
    if types == {"string"}:
        return dumped(text)
    word = text.strip()
    if "null" in types and word in ("null", "None"):
        return "null"
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower()
    if types & {"integer", "number"}:
        if INTEGER.fullmatch(word):
            return word
        if "number" not in types and (whole := WHOLE.fullmatch(word)):
            return whole[1]
        if "number" in types and _is_a(word, (int, float)):
            return word
    wanted = tuple(kind for name, kind in (("object", dict), ("array", list)) if name in types)
    if wanted and word[:1] in "{[":
        if _is_a(word, wanted):
            return word
        value = python_value(word)  # templates may write Python's form
        if isinstance(value, wanted):
            return _dumped_or(value, text)
    return dumped(text)


def _is_a(text: str, kinds: tuple[type, ...]) -> bool:
    try:
        value = loaded(text)
    except ValueError:
        return False
    return isinstance(value, kinds) and not isinstance(value, bool)


def _dumped_or(value: Any, text: str) -> str:
    try:
        return dumped(value)
    except (ValueError, TypeError, RecursionError):
        return dumped(text)


class NoLiteral:
    """What `python_value` returns for text that is no literal of Python."""


def python_value(text: str) -> Any:
    """The value of a literal of Python, in which JSON's true, false and null are too; or NoLiteral."""
    import warnings

    try:
        with warnings.catch_warnings():  # of backslashes that escape nothing
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval")
            for node in ast.walk(tree):
                for name, value in ast.iter_fields(node):
                    parts = value if isinstance(value, list) else [value]
                    changed = [_named(part) for part in parts]
                    if any(new is not old for new, old in zip(changed, parts, strict=True)):
                        setattr(node, name, changed if isinstance(value, list) else changed[0])
            return ast.literal_eval(tree)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return NoLiteral


def _named(node: Any) -> Any:
    names = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in names:
        return ast.copy_location(ast.Constant(names[node.id]), node)
    return node
