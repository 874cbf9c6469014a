"""From a user's JSON schema to what the grammar library compiles, and to what judges finished outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.features.structured_outputs.checks import SchemaCheck
from nanovllm.features.structured_outputs.exact import (
    Composer,
    NotComposedError,
    is_of_definitions,
    json_copy,
    needs_rules,
)
from nanovllm.features.structured_outputs.schemas import (
    reached,
    read_json,
    resolved,
    simplified,
    with_exact_bounds,
    without_annotations,
    write_json,
)

MOST_PARTS = 10_000  # objects of a schema, which take about a millisecond each


@dataclass(frozen=True, slots=True)
class PreparedSchema:
    """kind: "json" for a schema, or "lark". check: of the user's own schema."""

    kind: str
    text: str
    check: SchemaCheck


def prepare_schema(text: str, close_all: bool, options: dict[str, Any]) -> PreparedSchema:
    """Prepare a schema. close_all: objects with patternProperties are closed too. options: of the library's JSON.

    Raises RequestError for a schema that is invalid, or that cannot be enforced.
    """
    if (parts := text.count("{")) > MOST_PARTS:
        raise RequestError(f"it has {parts:,} objects: give at most {MOST_PARTS:,}")
    try:
        given = without_annotations(read_json(text))
        check = SchemaCheck(json_copy(given))
        # The dialect does not know that those are schemas which stand elsewhere, such as OpenAPI's components.
        named = [part for part in reached(given, given) if not is_of_definitions(str(part.get("$ref", "#/$defs/")))]
        targets = {id(target): target for target in (resolved(part, given) for part in named) if target is not given}
        for target in targets.values():
            if target is not None:  # an anchor or an id, which the library resolves
                check.check_schema(target)
        schema = simplified(given, close_all)
        schema.pop("$schema", None)
        named = check.dialect.META_SCHEMA.get("$schema", check.dialect.META_SCHEMA.get("id"))
        schema = {"$schema": named} | schema
        if needs_rules(schema):
            try:
                return PreparedSchema("lark", Composer(schema, options, check.is_valid).grammar(), check)
            except NotComposedError:  # what it can do without is refused by name
                pass
        return PreparedSchema("json", write_json(with_exact_bounds(json_copy(schema))), check)
    except RecursionError:
        raise RequestError("it is nested too deeply") from None
    except ArithmeticError:
        raise RequestError("it has a number with too large an exponent") from None
