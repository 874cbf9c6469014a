"""JSON schemas as the grammar library gets them.

What the library reads wrongly is written in another way here; `tests/test_schemas.py` shows each case. What it cannot
enforce, it refuses itself. Numbers are `Decimal` where they are not whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from decimal import Context, Decimal
from typing import Any
from urllib.parse import quote, unquote

from nanovllm.errors import RequestError, quoted
from nanovllm.features.structured_outputs.patterns import for_library

Schema = dict[str, Any]
MOST_INT_DIGITS = 4000  # of a number that is read as a whole one
# The library knows these.
FORMATS = frozenset(("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))
ANNOTATIONS = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
PARTS = ("additionalProperties", "items", "additionalItems")  # keywords with a schema,
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # with several,
MAPS = ("properties", "patternProperties")  # and with one for each name
OTHERS = ("additionalProperties", "unevaluatedProperties")  # they speak of properties that are not named
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
EXACT = 2**53  # whole numbers up to this are doubles, as which the library reads numbers
WIDEST = 2**63 - 1024  # the largest double that fits into 64 bits
MOST_DIGITS = 15  # of a decimal that the library writes as it is
MOST_DECIMALS = 22
LEAST = Decimal("1e-15")  # stands for the least number above 0


def read_json(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """JSON with exact numbers. pairs: makes an object of its members. Raises ValueError and RecursionError."""
    return json.loads(text, parse_float=Decimal, parse_int=_int, object_pairs_hook=pairs)


def _int(text: str) -> int | Decimal:
    return int(text) if len(text) <= MOST_INT_DIGITS else Decimal(text)


def write_json(value: Any) -> str:
    """JSON without spaces, with every digit of its decimals."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{write_json(name)}:{write_json(part)}' for name, part in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(write_json, value))}]"
    if isinstance(value, Decimal):
        return format(value, "f") if abs(value.adjusted()) < MOST_INT_DIGITS else str(value)
    return json.dumps(value, ensure_ascii=False)


def for_grammar(text: str, close_all: bool) -> str:
    """The text of a schema as the library gets it.

    close_all: objects with patternProperties are closed too. Raises RequestError for a schema without values, and for a
    constant that the library would write as another number.
    """
    schema = read_json(text)
    if schema is False:
        raise RequestError("it allows no value")
    schema = {} if schema is True else schema
    for part in reversed(list(reached(schema, schema))):  # those within others first
        _drop_what_has_no_effect(part)
        _rewrite(part, schema)
        _rewrite_bounds(part)
        for name in ("const", "enum"):
            if name in part and not is_exact(part[name]):
                raise RequestError(f"{name}={quoted(part[name])}: a number of so many digits cannot be kept exactly")
    parts = list(reached(schema, schema))
    if not any(map(_speaks_with_others, parts)):
        for part in parts:
            _close(part, close_all)
    return write_json(schema)


def reached(start: Any, root: Any) -> Iterator[Schema]:
    """Every part of a schema that says something of an instance or its parts, those of references too, once each."""
    waiting = [start]
    seen = set()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += _parts_of(part)
        if isinstance(part.get("$ref"), str):
            waiting.append(resolved(part, root))


def _parts_of(schema: Schema) -> list[Any]:
    """The schemas directly in a schema."""
    parts = [schema[name] for name in PARTS if isinstance(schema.get(name), dict)]
    parts += [part for name in LISTS if isinstance(schema.get(name), list) for part in schema[name]]
    return parts + [part for name in MAPS if isinstance(schema.get(name), dict) for part in schema[name].values()]


def resolved(schema: Any, root: Any) -> Any:
    """What a reference in the document leads to, past others that say nothing else; None if it is not found there."""
    for _ in range(100):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str):
            return schema
        if not reference.startswith("#") or reference[1:2] not in ("", "/"):
            return None
        target = root
        for step in reference[2:].split("/") if len(reference) > 1 else ():
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(step) if isinstance(target, list) else step]
            except (LookupError, ValueError, TypeError):
                return None
        if not isinstance(target, dict) or target.keys() != {"$ref"}:
            return target
        schema = target
    return None


def _drop_what_has_no_effect(schema: Schema) -> None:
    """Leave out notes, and what generators write and the library refuses."""
    for name in ANNOTATIONS:
        schema.pop(name, None)
    if schema.get("format") not in FORMATS:
        schema.pop("format", None)
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if schema.get("propertyNames") in (True, {}):
        del schema["propertyNames"]


def _rewrite(schema: Schema, root: Any) -> None:
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = for_library(schema["pattern"])
    if isinstance(schema.get("patternProperties"), dict):
        schema["patternProperties"] = {for_library(name): part for name, part in schema["patternProperties"].items()}
    if isinstance(schema.get("$ref"), str):  # some generators do not escape brackets and spaces
        schema["$ref"] = quote(schema["$ref"], safe="#/%:?&=~$!*'()+,;@")
    if isinstance(schema.get("anyOf"), list):  # pydantic's Decimal is a number, or a text with look-around
        schema["anyOf"] = [part for part in schema["anyOf"] if not _looks_around(part)] or schema["anyOf"]
    tag = schema.get("discriminator")
    tag = tag.get("propertyName") if isinstance(tag, dict) else None
    if isinstance(tag, str) and isinstance(schema.get("oneOf"), list):  # pydantic does not require one with a default
        schema["oneOf"] = [_requiring(tag, resolved(part, root)) for part in schema["oneOf"]]
    names = resolved(schema.get("propertyNames"), root)
    if isinstance(names, dict) and isinstance(names.get("enum"), list) and "properties" not in schema:
        others = schema.pop("additionalProperties", True)  # pydantic's dict[Literal["a", "b"], int]
        schema["properties"] = {name: others for name in names["enum"] if isinstance(name, str)}
        schema["additionalProperties"] = False
        del schema["propertyNames"]


def _looks_around(part: Any) -> bool:
    pattern = part.get("pattern") if isinstance(part, dict) else None
    return isinstance(pattern, str) and any(mark in pattern for mark in ("(?=", "(?!", "(?<=", "(?<!"))


def _requiring(tag: str, part: Any) -> Any:
    """A copy of an option that requires the property `tag`, as each of the options does that it may consist of."""
    if not isinstance(part, dict):
        return part
    if isinstance(part.get("oneOf"), list):
        return part | {"oneOf": [_requiring(tag, option) for option in part["oneOf"]]}
    return part | {"required": [*part.get("required", ()), tag]}


# ---- numbers


def _rewrite_bounds(schema: Schema) -> None:
    """Move bounds inside to numbers that the library keeps: it has 64 bits, and takes 0 for a number above it."""
    bounds = {name: schema[name] for name in BOUNDS if is_number(schema.get(name))}
    if "integer" in _types(schema):
        for name, value in bounds.items():
            if value > WIDEST and name in ("maximum", "exclusiveMaximum"):
                schema[name] = WIDEST
            elif value < -WIDEST and name in ("minimum", "exclusiveMinimum"):
                schema[name] = -WIDEST
        return
    if bounds.get("exclusiveMinimum") == 0 and min(bounds.get("maximum", 1), bounds.get("exclusiveMaximum", 1)) < 1:
        schema["minimum"] = max(schema.get("minimum", 0), LEAST)
        del schema["exclusiveMinimum"]
    if bounds.get("exclusiveMaximum") == 0 and max(bounds.get("minimum", -1), bounds.get("exclusiveMinimum", -1)) > -1:
        schema["maximum"] = min(schema.get("maximum", 0), -LEAST)
        del schema["exclusiveMaximum"]


def _types(schema: Schema) -> list[Any]:
    types = schema.get("type", [])
    return types if isinstance(types, list) else [types]


def is_number(value: object) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def is_exact(value: Any) -> bool:
    """Whether the library writes every number of a JSON value as it is."""
    if isinstance(value, dict):
        return all(map(is_exact, value.values()))
    if isinstance(value, list):
        return all(map(is_exact, value))
    if isinstance(value, int):
        return abs(value) <= EXACT
    if not isinstance(value, Decimal):
        return True
    _, digits, exponent = value.normalize(Context(prec=5000)).as_tuple()
    return len(digits) <= MOST_DIGITS and isinstance(exponent, int) and -MOST_DECIMALS <= exponent <= 0


# ---- objects take no properties that the schema does not name, unless it speaks of others


def _speaks_with_others(part: Schema) -> bool:
    """Whether several parts of a schema may speak of one object, none of which knows what the others name."""
    own = any(name in part for name in ("required", *MAPS, *OTHERS))
    options = part.get("allOf")
    number = len(options) if isinstance(options, list) else 0
    return own + ("$ref" in part) + number + ("anyOf" in part) + ("oneOf" in part) > 1


def _close(part: Schema, close_all: bool) -> None:
    """Small models go on with properties of their own otherwise, and never end an object."""
    has_names = isinstance(part.get("properties"), dict)
    if any(name in part for name in OTHERS) or not (has_names or (close_all and "patternProperties" in part)):
        return
    if "patternProperties" in part and not close_all:
        return
    required = part.get("required")
    for name in required if has_names and isinstance(required, list) else ():
        part["properties"].setdefault(name, {})
    part["additionalProperties"] = False
