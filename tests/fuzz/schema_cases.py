"""Random JSON schemas and values, for the fuzz of structured outputs."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("a", "ab", "b", "é", "x y", 'q"')
TEXTS = ("", "a", "ab", "é", "日本", 'q"\\', "0", "a\nb", "\U0001f600")
WHOLE = (0, 1, -1, 2, 3, 7, 10, 99, 100, 2**31, 2**53 - 1, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**64, 10**20)
DECIMALS = (
    0.0,
    -0.0,
    0.1,
    0.5,
    -0.5,
    1.5,
    0.25,
    1e-7,
    123456789.12345679,
    0.1 + 0.2,
    99.99,
    1e22,
    1e300,
    5e-324,
    -2.75,
)
MULTIPLES = (1, 2, 3, 7, 10, 0.1, 0.5, 0.25, 0.01, 1.5, 100, 65537)
PATTERNS = (
    "^a", "a$", "^[a-c]+$", "^a|b$", "^[^x]$", r"^\d{2,3}$", r"^\w+$", "^$", "b", r"^a\.b$", "^(a|ab)(c|bcd)?$",
    "^[a&&b]$", "^[a--z]$", "^[[a]$", "^{a}$", r"^\/[\d-]$", "^.$", "^a{,2}$", r"^\cJ$", "^(?:a|b)*$", r"^\x41\u0042$",
)  # fmt: skip
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "path", "binary", "int64", "x")
NOTES = ("title", "description", "$comment", "x-order", "contentEncoding")


class Maker:
    """Makes schemas of one random generator. Definitions may refer to each other and to themselves."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.definitions = [f"d{index}" for index in range(rng.randrange(3))]

    def document(self) -> Any:
        schema = self.schema(3)
        if not isinstance(schema, dict) or not self.definitions:
            return schema
        return schema | {"$defs": {name: self.schema(2) for name in self.definitions}}

    def schema(self, depth: int) -> Any:
        rng = self.rng
        if rng.random() < 0.03:
            return rng.random() < 0.8
        kinds = [self.number, self.whole, self.text, self.constant]
        if depth:
            kinds += [self.object, self.object, self.array, self.combined, self.typed]
            kinds += [self.reference] * bool(self.definitions)
        schema = rng.choice(kinds)(depth - 1)
        if rng.random() < 0.1:
            schema[rng.choice(NOTES)] = "a note"
        return schema

    def number(self, _: int) -> dict[str, Any]:
        return {"type": "number"} | self.bounds(WHOLE + DECIMALS)

    def whole(self, _: int) -> dict[str, Any]:
        return {"type": "integer"} | self.bounds(WHOLE + DECIMALS[:8])

    def bounds(self, values: tuple[float, ...]) -> dict[str, Any]:
        rng = self.rng
        low, high = sorted((rng.choice(values), rng.choice(values)))
        schema: dict[str, Any] = {}
        if rng.random() < 0.5:
            schema[rng.choice(("minimum", "exclusiveMinimum"))] = low
        if rng.random() < 0.5:
            schema[rng.choice(("maximum", "exclusiveMaximum"))] = high
        if rng.random() < 0.15:
            schema["multipleOf"] = rng.choice(MULTIPLES)
        return schema

    def text(self, _: int) -> dict[str, Any]:
        rng = self.rng
        schema: dict[str, Any] = {"type": "string"}
        if rng.random() < 0.4:
            schema["pattern"] = rng.choice(PATTERNS)
        if rng.random() < 0.3:
            schema["minLength"] = rng.randrange(3)
        if rng.random() < 0.3:
            schema["maxLength"] = rng.randrange(2, 6)
        if rng.random() < 0.15:
            schema["format"] = rng.choice(FORMATS)
        return schema

    def constant(self, _: int) -> dict[str, Any]:
        rng = self.rng
        values = [self.value(2) for _ in range(rng.randint(1, 4))]
        schema: dict[str, Any] = {"const": values[0]} if rng.random() < 0.3 else {"enum": values}
        if rng.random() < 0.2:
            schema["type"] = rng.choice(("string", "integer", "number", "array", ["object", "null", "integer"]))
        return schema

    def object(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        names = rng.sample(NAMES, rng.randrange(4))
        made: dict[str, Any] = {"type": "object"}
        if names or rng.random() < 0.5:
            made["properties"] = {name: self.schema(depth) for name in names}
        if rng.random() < 0.6:
            made["required"] = [name for name in names if rng.random() < 0.7]
        if rng.random() < 0.1:
            made.setdefault("required", []).append("other")
        if rng.random() < 0.3:
            made["additionalProperties"] = rng.choice((True, False, {"type": "integer"}, {"type": "string"}))
        if rng.random() < 0.1:
            made["patternProperties"] = {rng.choice(("^a", "b$", "^[x-z]+$")): self.schema(0)}
        if rng.random() < 0.05:
            made[rng.choice(("minProperties", "maxProperties"))] = rng.randrange(3)
        if rng.random() < 0.05:
            made["propertyNames"] = rng.choice(
                ({"enum": ["a", "b"]}, {"pattern": "^a"}, {"maxLength": 2}, True, {"format": "x"})
            )
        if rng.random() < 0.03:
            made["unevaluatedProperties"] = rng.random() < 0.5
        return made

    def array(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        made: dict[str, Any] = {"type": "array"}
        if rng.random() < 0.3:
            made["prefixItems"] = [self.schema(depth) for _ in range(rng.randrange(1, 3))]
        if rng.random() < 0.8:
            made["items"] = self.schema(depth)
        if rng.random() < 0.4:
            made["minItems"] = rng.randrange(3)
        if rng.random() < 0.5:
            made["maxItems"] = rng.randrange(2, 4)
        if rng.random() < 0.1:
            made["uniqueItems"] = rng.random() < 0.3
        return made

    def combined(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        kind = rng.choice(("anyOf", "anyOf", "allOf", "allOf", "oneOf"))
        made: dict[str, Any] = {kind: [self.schema(depth) for _ in range(rng.randint(1, 3))]}
        if rng.random() < 0.3:
            made |= rng.choice((self.object, self.number, self.text))(depth)
        if rng.random() < 0.05:
            made[rng.choice(("not", "if", "then", "dependentRequired", "minContains"))] = {}
        return made

    def typed(self, depth: int) -> dict[str, Any]:
        """Several types, or keywords without one."""
        schema = self.rng.choice((self.object, self.number, self.whole, self.text, self.array))(depth)
        if self.rng.random() < 0.5:
            schema["type"] = [schema["type"], self.rng.choice(("null", "boolean"))]
        else:
            del schema["type"]
        return schema

    def reference(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"$ref": f"#/$defs/{self.rng.choice(self.definitions)}"}
        if self.rng.random() < 0.2:
            schema |= self.rng.choice((self.object, self.number, self.text))(depth)
        return schema

    def value(self, depth: int) -> Any:
        rng = self.rng
        kind = rng.randrange(6 if depth else 4)
        if kind < 4:
            return rng.choice(
                (rng.choice(TEXTS), rng.choice(WHOLE), rng.choice(DECIMALS), rng.choice((None, True, False)))
            )
        if kind == 4:
            return [self.value(depth - 1) for _ in range(rng.randrange(3))]
        return {name: self.value(depth - 1) for name in rng.sample(NAMES, rng.randrange(3))}
