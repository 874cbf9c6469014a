"""JSON schemas as the grammar library gets them: which texts the masks allow, without a model."""

from __future__ import annotations

import json
import random
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

import pytest
from schema_masks import BYTES, allows, compiled, drawn

from nanovllm.errors import RequestError
from nanovllm.features.structured_outputs.checks import SchemaCheck
from nanovllm.features.structured_outputs.grammars import matcher_of
from nanovllm.features.structured_outputs.schemas import read_json

pydantic = pytest.importorskip("pydantic", reason="the package pydantic is not installed")
SNOWFLAKE = 1234567890123456789
ONE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAGGED = [
    {"type": "object", "properties": {"k": {"const": name}, name: {"type": "integer"}}, "required": ["k"]}
    for name in ("x", "y")
]
# A schema, texts that match it, and texts that do not.
CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "above 0": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        ["0.5", "0.00001"],
        ["0", "-0", "0.0", "0.6"],
    ),
    "below 0": ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.1"], ["0", "-0", "-0.0"]),
    "above 0, below 0.9": ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.9}, ["0.8", '"x"'], ["0", "0.9"]),
    "nothing between": ({"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 0}, ["null"], ["0"]),
    "int64": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        [f"{2**62}", f"{-(2**62)}", "0", "-7"],
        [f"{2**63}", f"{-(2**63) - 1}", "00", "1.5"],
    ),
    "nested": (
        {
            "type": "object",
            "properties": {
                "id": {"$ref": "#/$defs/id"},
                "rate": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                "ids": {"type": "array", "items": {"$ref": "#/$defs/id"}, "maxItems": 2},
            },
            "required": ["id"],
            "$defs": {"id": {"anyOf": [{"enum": [7]}, {"type": "null"}]}},
        },
        ['{"id":7,"rate":0.5,"ids":[null,7]}', '{"id":null,"ids":[]}'],
        ['{"id":1}', '{"rate":0.5}', '{"id":null,"rate":0}', '{"id":null,"ids":[null,null,null]}', '{"id":null,"x":1}'],
    ),
    "in allOf": (
        {"allOf": [{"type": "integer", "maximum": 2**63 - 1}, {"minimum": 5}]},
        ["5", f"{2**62}"],
        [f"{2**63}", "4"],
    ),
    "closed": (ONE, ['{"a":1}'], ['{"a":1,"b":2}']),
    "open": (ONE | {"additionalProperties": True}, ['{"a":1,"b":[]}'], ['{"b":1}']),
    "without properties": ({"type": "object"}, ['{"a":1}', "{}"], ["1"]),
    "joined, and so open": (
        {"allOf": [{"$ref": "#/$defs/one"}, {"properties": {"b": {"type": "null"}}}], "$defs": {"one": ONE}},
        ['{"a":1,"b":null}', '{"a":1}'],
        ['{"b":null}', '{"a":"x"}'],
    ),
    "options": ({"anyOf": [ONE, {"type": "object", "properties": {"b": {}}}]}, ['{"b":1}', "{}"], ['{"a":1,"b":1}']),
    "tags": ({"oneOf": TAGGED}, ['{"k":"x","x":1}', '{"k":"y"}'], ['{"k":"z"}', '{"k":"x","y":1}']),
    "tuple of draft 7": ({"items": [{"type": "null"}], "type": "array"}, ["[null,1]", "[]"], ["[1]"]),
    "draft 4": ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
    "no effect": (
        {
            **{"type": ["string", "array"], "format": "no-such", "uniqueItems": False, "propertyNames": True},
            **{"deprecated": True, "x-order": 3, "contentEncoding": "base64", "discriminator": {"propertyName": "k"}},
        },
        ['"x"', "[1,1]"],
        ["1"],
    ),
    "keys": ({"propertyNames": {"enum": ["a"]}, "type": "object"}, ['{"a":1}', "{}"], ['{"b":1}']),
    "a class of ECMA's": ({"type": "string", "pattern": "^[[a&&b]$"}, ['"["', '"a"', '"&"'], ['"c"']),
    "a class without quotes": ({"type": "string", "pattern": '^[^"]*$'}, ['"a\\n"', '"é"'], ['"\\""', '"a\\"b"']),
    "a class without backslashes": ({"type": "string", "pattern": "^[\\x00-!#-[]+$"}, ['"A"'], ['"\\\\"']),
    "a class without dashes": ({"type": "string", "pattern": '^[^-"]$'}, ['"a"', '"!"'], ['"-"', '"\\""']),
    "names with quotes": (
        {"type": "object", "properties": {'a"': {"type": "null"}}, "additionalProperties": {"type": "string"}},
        ['{"a\\"":null,"a":"x","":""}'],
        ['{"a\\"":"x"}'],
    ),
    "constants of a oneOf": (
        {"oneOf": [{"const": 1}, {"const": 2}, {"enum": ["a", True]}]},
        ["1", '"a"', "true"],
        ["3", "false"],
    ),
    "a reference with a bound, in another": (
        {
            "$ref": "#/$defs/rate",
            "$defs": {"rate": {"$ref": "#/$defs/n", "exclusiveMinimum": 0, "maximum": 0.5}, "n": {"type": "number"}},
        },
        ["0.5"],
        ["0", "0.6"],
    ),
    "look-around in an option": (
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}]},
        ["1.5"],
        ['"."'],
    ),
    "a name that is not escaped": (
        {"$ref": "#/$defs/List<int> of[x]", "$defs": {"List<int> of[x]": {"type": "integer"}}},
        ["1"],
        ['"x"'],
    ),
    "an anchor": ({"$ref": "#x", "$defs": {"q": {"$anchor": "x", "type": "integer"}}}, ["1"], ['"x"']),
    "another draft than it says": (
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "array", "items": [{"type": "null"}]},
        ["[null]"],
        ["[1]"],
    ),
    "a tag that no option requires": (
        {
            "oneOf": [{"$ref": f"#/$defs/{name}"} for name in "xy"],
            "discriminator": {"propertyName": "k"},
            "$defs": {each["properties"]["k"]["const"]: each | {"required": []} for each in TAGGED},
        },
        ['{"k":"x"}', '{"k":"y","y":1}'],
        ["{}", '{"k":"z"}'],
    ),
    "braces": ({"type": "string", "pattern": "^{a,}$"}, ['"{a,}"'], ['"a"']),
}


# Of the cases above, those that this project rewrites for the library.
REWRITTEN = (
    *(
        "above 0",
        "below 0",
        "above 0, below 0.9",
        "a reference with a bound, in another",
        "int64",
        "closed",
        "no effect",
    ),
    *("keys", "constants of a oneOf", "a class of ECMA's", "a class without quotes", "a class without backslashes"),
    *("a class without dashes", "braces", "look-around in an option", "a name that is not escaped"),
    *("a tag that no option requires",),
)


@pytest.mark.parametrize("name", CASES)
def test_masks_allow_what_the_schema_does(name: str) -> None:
    schema, right, wrong = CASES[name]
    start, judge = compiled(schema)
    for text in right:
        assert allows(start, text), text
        assert judge(text) is None
    for text in wrong:
        assert not allows(start, text), text


@pytest.mark.parametrize("name", REWRITTEN)
def test_the_library_alone_does_not(name: str) -> None:
    """If this fails, the library has learned it, and what `schemas` or `patterns` do about it can go."""
    schema, right, wrong = CASES[name]
    try:
        start = matcher_of(BYTES, "json", json.dumps(schema), {"whitespace_flexible": False})
    except RequestError:
        return
    assert not all(allows(start, text) for text in right) or any(allows(start, text) for text in wrong)


def test_constants_of_many_digits_are_refused_since_the_library_writes_others() -> None:
    schema = {"enum": [SNOWFLAKE, "x"]}
    start = matcher_of(BYTES, "json", json.dumps(schema), {"whitespace_flexible": False})
    assert allows(start, f"{SNOWFLAKE - 21}") and not allows(start, f"{SNOWFLAKE}")
    for wrong in (schema, {"const": [123456789.12345679]}):
        with pytest.raises(RequestError, match="a number of so many digits cannot be kept exactly"):
            compiled(wrong)


def test_what_the_mask_lets_through_is_judged() -> None:
    """What the library reads wrongly and is not rewritten: the output ends with an error."""
    names = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    both = {"oneOf": [{"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 5}]}
    for schema, text in ((names, '{"\\u0061":"x"}'), (both, "3")):
        start, judge = compiled(schema)
        assert allows(start, text) and judge(text) is not None


@pytest.mark.parametrize(
    "schema, says",
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"if": {"type": "integer"}, "then": {"minimum": 1}}, "Unimplemented keys"),
        ({"type": "foo"}, "no valid JSON schema: 'foo' is not valid"),
        ({"type": "integer", "minimum": "3"}, "no valid JSON schema: '3' is not of type 'number' at"),
        (False, "it allows no value"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_enforced_is_refused_by_name(schema: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        compiled(schema)


def test_outputs_are_checked_in_bounded_time() -> None:
    elsewhere = SchemaCheck({"$ref": "#/components/A", "components": {"A": {"required": True}}})
    assert elsewhere.error("{}") is None, "what it refers to is no schema"
    nested: dict[str, Any] = {"$defs": {"n": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/n"}] * 2}}}}
    assert SchemaCheck(nested | {"$ref": "#/$defs/n"}).error("[" * 60 + "1" + "]" * 60) is None, "given up"
    slow = SchemaCheck({"pattern": "^(a|aa)+(a|aa)+$"})
    assert slow.error(json.dumps("a" * 5000 + "b")) != "", "it ends"
    assert slow.error('"b"') is not None
    integers = SchemaCheck({"items": {"type": "integer", "multipleOf": 3}})
    assert integers.error("[9.0, 3e2, 0]") is None and integers.error(f"[{3 * 10**30 + 1}]") is not None
    twice = SchemaCheck({"properties": {"a": {"type": "integer"}}})
    assert twice.error('{"a":"x","a":1}') is not None, "a reader may take the first"
    assert SchemaCheck({"type": "number"}).error("0e99999999999999999999999") is None
    assert SchemaCheck({"const": 2**60 + 1}).error(f"{2**60 + 1}") is None


class Colour(Enum):
    RED = "red"
    TWO = 2


class Pair(NamedTuple):
    x: int
    y: str


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str = pydantic.Field(min_length=1, max_length=3)


class Lion(pydantic.BaseModel):
    kind: Literal["lion"] = "lion"
    mane: Literal["long"] = "long"


class Tiger(pydantic.BaseModel):
    kind: Literal["lion"] = "lion"
    mane: Literal["none"] = "none"


Wild = Annotated[Lion | Tiger, pydantic.Field(discriminator="mane")]


class Node(pydantic.BaseModel):
    value: int
    children: list[Node] = pydantic.Field(default_factory=list)


TYPES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (Path, bytes, UUID, datetime, date, time, Decimal, Colour, Pair, Node)},
    **{kind.__name__: kind for kind in (IPv4Address, IPv6Address)},
    "timedelta": timedelta,
    "SecretStr": pydantic.SecretStr,
    "literal keys": dict[Literal["a", "b"], int],
    "enum keys": dict[Colour, bool],
    "discriminated": Annotated[Cat | Dog, pydantic.Field(discriminator="kind")],
    "discriminated twice": Annotated[Wild | Cat, pydantic.Field(discriminator="kind")],
    "optional": Cat | None,
    "gt and lt": Annotated[float, pydantic.Field(gt=0, lt=0.5)],
    "int64": Annotated[int, pydantic.Field(ge=-(2**63), le=2**63 - 1)],
    "multiples": Annotated[int, pydantic.Field(gt=0, le=10, multiple_of=3)],
    "pattern": Annotated[str, pydantic.Field(min_length=1, pattern="^[a-z]+$")],
    "tuple": tuple[int, str, bool],
    "list": list[Dog],
    "map": dict[str, Pair],
    "literals": Literal[1, "a", True, None],
}


@pytest.mark.parametrize("name", TYPES)
def test_models_of_pydantic(name: str) -> None:
    """An output that was drawn at random is one of the model's."""
    model = pydantic.create_model("Model", field=(TYPES[name], ...))
    start, judge = compiled(model.model_json_schema())
    rng = random.Random(name)
    outputs = [output for output in (drawn(start, rng) for _ in range(3)) if output is not None]
    assert outputs
    for output in outputs:
        assert judge(output.decode()) is None
        if name not in (
            "datetime",
            "time",
            "timedelta",
            "Decimal",
        ):  # of which pydantic takes less than its schema says
            model.model_validate_json(output)


def test_numbers_are_read_exactly() -> None:
    assert read_json("[1.10, 12345678901234567890.5]") == [Decimal("1.10"), Decimal("12345678901234567890.5")]
