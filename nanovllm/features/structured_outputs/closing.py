"""Objects of JSON schemas take no properties that the schema does not name, unless it speaks of others.

Small models go on with properties of their own otherwise, and never close an object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import Any

from nanovllm.errors import RequestError

Schema = dict[str, Any]
SPEAKS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
MOST_JOINED = 50_000  # parts that are looked at to see what speaks of one object: about a second
TOGETHER = ("allOf", "anyOf", "oneOf")


def close_objects(
    parts: Sequence[Schema], resolve: Callable[[Any], Any], close_all: bool, kept_open: Set[int]
) -> set[int]:
    """Close the objects of a schema, in place. Returns the ids of the parts that speak of an object beside others.

    parts: of the schema, all that can be reached. resolve: follows references. Where several parts speak of the same
    object, as with allOf, the object takes what any of them names. close_all: patternProperties keep none open.
    kept_open: ids of parts that stay as they are. Raises RequestError where too many parts refer to each other.
    """
    speaks = tuple(name for name in SPEAKS if not (close_all and name == "patternProperties"))
    joined: set[int] = set()
    looked = 0
    together: set[int] = set()  # those, and the parts that join them
    for part in parts:
        if _speaks_with_others(part):
            ids = [id(other) for other in _same_object(part, resolve)]
            joined.update(ids[1:])
            together.update(ids)
            looked += len(ids)
            if looked > MOST_JOINED:
                raise RequestError("too many of its parts speak of the same objects: use fewer references and allOf")
    for part in parts:
        if id(part) in joined or id(part) in kept_open:
            continue
        same = _same_object(part, resolve) if _speaks_with_others(part) or _refers(part, joined, resolve) else [part]
        if any(name in other for other in same for name in (*speaks, "oneOf")):
            continue
        if not any("properties" in other or (close_all and "patternProperties" in other) for other in same):
            continue
        named = [name for other in same for name in (*other.get("properties", {}), *other.get("required", ()))]
        part["properties"] = {name: True for name in named} | part.get("properties", {})
        part["additionalProperties"] = False
    return together


def _speaks_with_others(part: Schema) -> bool:
    """Whether more than one part of a schema may speak of one object."""
    own = any(name in part for name in ("properties", "required", *SPEAKS))
    return own + ("$ref" in part) + len(part.get("allOf", ())) + ("anyOf" in part) + ("oneOf" in part) > 1


def _refers(part: Schema, joined: set[int], resolve: Callable[[Any], Any]) -> bool:
    return "$ref" in part and id(resolve(part)) in joined


def _same_object(part: Schema, resolve: Callable[[Any], Any]) -> list[Schema]:
    """The part and those that it joins with references, allOf, anyOf and oneOf, in order."""
    found: dict[int, Schema] = {}
    waiting: deque[Any] = deque([part])
    while waiting:
        current = waiting.popleft()
        if not isinstance(current, dict) or id(current) in found:
            continue
        found[id(current)] = current
        if "$ref" in current:
            waiting.append(resolve(current))
        waiting += [option for name in TOGETHER for option in current.get(name, ())]
    return list(found.values())
