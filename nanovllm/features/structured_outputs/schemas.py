"""JSON schemas as the grammar library gets them: pure functions from a schema to one that means the same.

What has no effect is left out, what the library reads wrongly is written in another way, and what can be neither is
refused by name. Numbers are `Decimal` where they are not whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from math import lcm
from typing import Any
from urllib.parse import quote, unquote

from nanovllm.errors import RequestError, quoted
from nanovllm.features.structured_outputs.closing import close_objects
from nanovllm.features.structured_outputs.numbers import BOUNDS, all_exact, is_number, narrowed, plain
from nanovllm.features.structured_outputs.patterns import for_library, other_names

Schema = dict[str, Any]
MOST_INT_DIGITS = 4000
MOST_NAMES = 2000  # characters of names that a pattern for others excludes
# Those that the library knows.
FORMATS = frozenset(("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))
UUID = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"
ANNOTATIONS = {
    "title",
    "description",
    "default",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
}
PARTS = ("additionalProperties", "items", "additionalItems")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
MAPS = ("properties", "patternProperties")
MOST_MULTIPLE = 2**32 - 1  # the library's arithmetic has 32 bits
UNENFORCED = {
    "not": "say what is allowed instead",
    "if": "use anyOf",
    "contains": "use prefixItems or items",
    "uniqueItems": "use an array whose items may be equal (a list, not a set)",
    "propertyNames": "name the properties, or use patternProperties",
    "dependentRequired": "use anyOf",
    "dependentSchemas": "use anyOf",
    "dependencies": "use anyOf",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}


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


def without_annotations(root: Any) -> Any:
    """The schema without what has no effect on any value, whatever it is: generators write null for "none"."""
    for part in reached(root, root):
        for name in part.keys() & ANNOTATIONS:
            del part[name]
    return root


def simplified(root: Any, close_all: bool) -> Any:
    """The schema as the library can take it, but for numbers. It is changed in place.

    close_all: objects with patternProperties take no others either. Raises RequestError for what cannot be enforced.
    """
    if not isinstance(root, dict):
        if root is False:
            raise RequestError("it allows no value")
        return {}
    for part in reached(root, root):
        _check_enforced(part, root)
        _drop_what_has_no_effect(part)
        _rewrite(part, root)
    _check_multiples(root)
    # Closed options of a oneOf would exclude each other where those of the user need not.
    options = [option for part in reached(root, root) for option in part.get("oneOf", ())]
    kept_open = {id(part) for option in options for part in reached(option, root)}
    joined = close_objects(list(reached(root, root)), partial(resolved, root=root), close_all, kept_open)
    for part in reached(root, root):
        if id(part) not in joined:
            _name_others_by_pattern(part)
    return root


def reached(start: Any, root: Schema) -> Iterator[Schema]:
    """Every part of a schema that says something of an instance or its parts, those of references too, once each."""
    waiting = [start]
    seen = set()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += parts_of(part)
        if isinstance(part.get("$ref"), str):
            waiting.append(resolved(part, root))


def parts_of(schema: Schema) -> list[Any]:
    """The schemas directly in a schema."""
    found = [schema[name] for name in PARTS if isinstance(schema.get(name), dict)]
    found += [part for name in LISTS if isinstance(schema.get(name), list) for part in schema[name]]
    return found + [part for name in MAPS if isinstance(schema.get(name), dict) for part in schema[name].values()]


def resolved(schema: Any, root: Schema) -> Any:
    """What a reference in the document leads to, past others that say nothing else; None if it is not found there."""
    for _ in range(100):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str):
            return schema
        if not reference.startswith("#") or reference[1:2] not in ("", "/"):
            return None
        target: Any = root
        for step in reference[2:].split("/") if len(reference) > 1 else ():
            step = unquoted(step)
            try:
                target = target[int(step) if isinstance(target, list) else step]
            except (LookupError, ValueError, TypeError):
                return None
        if not isinstance(target, dict) or target.keys() != {"$ref"}:
            return target
        schema = target
    return None


def unquoted(step: str) -> str:
    """A name in a reference, as it stands in the schema."""
    return unquote(step).replace("~1", "/").replace("~0", "~")


def _check_enforced(schema: Schema, root: Schema) -> None:
    """Raise RequestError for a keyword that has an effect and that no mask can enforce."""
    if schema.get("not", 0) is False:
        del schema["not"]
    elif schema.get("not") in (True, {}):
        schema.clear()
        schema["enum"] = []
    if schema.get("uniqueItems") is not True or schema.get("maxItems", 2) < 2:
        schema.pop("uniqueItems", None)
    if "then" not in schema and "else" not in schema:
        schema.pop("if", None)
    for name in ("unevaluatedProperties", "unevaluatedItems", "propertyNames"):
        if schema.get(name) in (True, {}):
            del schema[name]
    for name in ("dependentRequired", "dependentSchemas", "dependencies"):
        needed = schema.get(name)
        if not isinstance(needed, dict) or not any(needed.values()):  # no object: the dialect does not know the name
            schema.pop(name, None)
    if schema.get("unevaluatedProperties") is False and not schema.keys() & {"allOf", "anyOf", "oneOf", "$ref"}:
        del schema["unevaluatedProperties"]
        schema.setdefault("additionalProperties", False)
    if "propertyNames" in schema:
        _rewrite_names(schema, root)
    for name in UNENFORCED:
        if name in schema:
            value = quoted(schema[name])
            raise RequestError(f"{name}={value} cannot be enforced while a model writes: {UNENFORCED[name]}")


def _rewrite_names(schema: Schema, root: Schema) -> None:
    """Properties or a pattern in place of propertyNames, where that says the same."""
    names = resolved(schema["propertyNames"], root)
    if not isinstance(names, dict) or "patternProperties" in schema:
        return
    told = {name for name in names if name not in ("title", "description", "$comment", "type", "format")}
    if names.get("type", "string") != "string" or (names.get("format") in FORMATS - {"uuid"}):
        return
    others = schema.get("additionalProperties", True)
    if told <= {"enum", "const"} and told:
        given = schema.get("properties", {})
        listed = names.get("enum", [names.get("const")])
        listed = [name for name in listed if isinstance(name, str) and names.get("const", name) == name]
        schema["properties"] = {name: given.get(name, others) for name in listed}
    elif not schema.get("properties") and (told == {"pattern"} or (not told and names.get("format") == "uuid")):
        schema["patternProperties"] = {names.get("pattern", UUID): others}
    elif not schema.get("properties") and told and told <= {"minLength", "maxLength"}:
        length = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
        schema["patternProperties"] = {f"^[\\s\\S]{{{length}}}$": others}
    elif told:
        return
    if told or names.get("format") == "uuid":
        schema["additionalProperties"] = False
    del schema["propertyNames"]


def _drop_what_has_no_effect(schema: Schema) -> None:
    if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
        del schema["format"]
    for name, needs in (("then", "if"), ("else", "if"), ("minContains", "contains"), ("maxContains", "contains")):
        if needs not in schema:
            schema.pop(name, None)
    if not isinstance(schema.get("items"), list):
        schema.pop("additionalItems", None)
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(schema.get(exclusive), bool):  # as in draft 4
            value = schema.pop(exclusive)
            if value and bound in schema:
                schema[exclusive] = schema.pop(bound)


def _rewrite(schema: Schema, root: Schema) -> None:
    if schema.get("format") in ("time", "date-time"):
        schema.setdefault("pattern", ":[0-5][0-9]:[0-5][0-9]")  # no leap second, which Python's types do not have
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = for_library(schema["pattern"])
    if isinstance(schema.get("patternProperties"), dict):
        schema["patternProperties"] = {for_library(name): part for name, part in schema["patternProperties"].items()}
    if isinstance(schema.get("$ref"), str):  # some generators do not escape brackets and spaces
        schema["$ref"] = quote(schema["$ref"], safe="#/%:?&=~$!*'()+,;@")
    if "anyOf" in schema:  # a pattern with look-around is not needed where there is another option, as for Decimal
        schema["anyOf"] = [each for each in schema["anyOf"] if not _looks_around(each, root)] or schema["anyOf"]
    if schema.get("oneOf") and "anyOf" not in schema:
        _rewrite_one_of(schema, root)


def _looks_around(option: Any, root: Schema) -> bool:
    part = resolved(option, root)
    pattern = part.get("pattern") if isinstance(part, dict) else None
    return isinstance(pattern, str) and any(mark in pattern for mark in ("(?=", "(?!", "(?<=", "(?<!"))


def _rewrite_one_of(schema: Schema, root: Schema) -> None:
    """anyOf in place of oneOf, where no value matches two of its options.

    Options that are told apart by their discriminator require it: pydantic lists none that has a default.
    """
    groups = [_leaves(option, root) for option in schema["oneOf"]]
    leaves = [leaf for group in groups for leaf in group]
    if len(groups) > 1 and not _told_apart(groups):
        if not all(isinstance(leaf, dict) and leaf.get("type") == "object" for leaf in leaves):
            return
        tag = schema.get("discriminator")
        tag = tag.get("propertyName") if isinstance(tag, dict) else tag  # a text in Swagger 2
        if not isinstance(tag, str):
            tag = ""
        names = set.intersection(*({*leaf.get("required", ()), tag} for leaf in leaves))
        found = [
            name
            for name in names
            if _told_apart([[leaf.get("properties", {}).get(name) for leaf in g] for g in groups])
        ]
        if not found:
            return
        if found == [tag]:  # copies: a definition may be used elsewhere too
            schema["oneOf"] = [_requiring(tag, option, root) for option in schema["oneOf"]]
    schema["anyOf"] = schema.pop("oneOf")


def _nested(part: Any) -> str | None:
    """The keyword of the options that an option consists of."""
    if not isinstance(part, dict) or part.keys() & {"type", "properties", "allOf", "$ref"}:
        return None
    return next((name for name in ("oneOf", "anyOf") if name in part), None)


def _leaves(option: Any, root: Schema) -> list[Any]:
    """The options of an option that consists of options, or itself."""
    part = resolved(option, root)
    name = _nested(part)
    return [part] if name is None else [leaf for each in part[name] for leaf in _leaves(each, root)]


def _requiring(tag: str, option: Any, root: Schema) -> Schema:
    """A copy of an option whose leaves require the property `tag`."""
    part = resolved(option, root)
    name = _nested(part)
    if name is not None:
        return part | {name: [_requiring(tag, each, root) for each in part[name]]}
    return part | {"required": sorted({*part.get("required", ()), tag})}


def _told_apart(groups: list[list[Any]]) -> bool:
    """Whether the schemas of a group allow other types, or list other constants, than those of every other group."""
    for told in (_types, _constants):
        found = [told(value) if isinstance(value, dict) else None for group in groups for value in group]
        if None not in found:
            joined = [{each for value in group for each in told(value) or ()} for group in groups]
            if len(set().union(*joined)) == sum(map(len, joined)):
                return True
    return False


def _types(schema: Schema) -> set[Any] | None:
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    return None if types is None else {"number" if kind == "integer" else kind for kind in types}


def _constants(schema: Schema) -> set[Any] | None:
    values = schema["enum"] if "enum" in schema else [schema.get("const", {})]
    simple = all(value is None or isinstance(value, str | int) for value in values)
    return {(type(value), value) for value in values} if simple else None


def _check_multiples(root: Schema) -> None:
    """Refuse multiples that have to be merged beyond the library's arithmetic, which would wrap around."""
    parts = list(reached(root, root))
    values = {plain(part["multipleOf"]) for part in parts if is_number(part.get("multipleOf"))}
    if len(values) > 1 and any(part.keys() & {"allOf", "$ref", "anyOf", "oneOf"} for part in parts):
        scale = 10 ** max(0, *(-int(Decimal(value).as_tuple().exponent) for value in values))
        if scale > MOST_MULTIPLE or max(values) * scale > MOST_MULTIPLE or _product(values, scale) > MOST_MULTIPLE:
            raise RequestError(f"multipleOf={quoted(max(values))} beside others is too large to be enforced")


def _product(values: set[int | Decimal], scale: int) -> int:
    """The least common multiple, times the largest, which bounds what the library computes on the way."""
    whole = [int(value * scale) for value in values]
    return lcm(*whole) * max(whole)


def _name_others_by_pattern(schema: Schema) -> None:
    """Give additional properties a pattern: otherwise the library also takes other spellings of the named ones."""
    others = schema.get("additionalProperties", True)
    names = schema.get("properties")
    if names and others is not False and "patternProperties" not in schema and sum(map(len, names)) < MOST_NAMES:
        schema["patternProperties"] = {other_names(names): others}
        schema["additionalProperties"] = False


def with_exact_bounds(root: Any) -> Any:
    """A simplified schema with bounds of numbers that the library keeps, in place.

    Raises RequestError for a constant that it does not.
    """
    for part in reached(root, root):
        try:
            bounds = narrowed(part, whole=is_whole(part))
        except ValueError:
            bounds = _without_numbers(part)
        if bounds is not part:
            part.clear()
            part.update(bounds)
        for name in ("const", "enum"):
            if name in part and not all_exact(part[name]):
                raise RequestError(
                    f"{name}={quoted(part[name])}: a number of so many digits cannot be kept exactly here"
                )
    return root


def _without_numbers(schema: Schema) -> Schema:
    """A schema that allows no numbers, where its bounds leave none."""
    types = schema.get("type", ["null", "boolean", "string", "array", "object"])
    left = [kind for kind in ([types] if isinstance(types, str) else types) if kind not in ("number", "integer")]
    rest = {name: part for name, part in schema.items() if name not in (*BOUNDS, "multipleOf")}
    return rest | {"type": left} if left else {"enum": []}


def is_whole(schema: Schema) -> bool:
    """Whether the only numbers that a schema's type allows are whole."""
    types = schema.get("type", ())
    types = [types] if isinstance(types, str) else types
    return "integer" in types and "number" not in types
