"""Checks finished outputs: whether they are what the user's own schema or choices say."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from decimal import Context, Decimal, InvalidOperation
from types import MappingProxyType
from typing import Any

import jsonschema
import regex
from jsonschema import validators
from referencing import Registry

from nanovllm.errors import RequestError, one_line, told
from nanovllm.features.structured_outputs.patterns import for_python, is_plain
from nanovllm.features.structured_outputs.schemas import read_json

MOST_WORK = 50_000  # keywords and listed values that a check compares: about a second
PATTERN_SECONDS = 0.05
MOST_EXPONENT = 4000  # of numbers whose multiples are checked
DIALECTS = (jsonschema.Draft202012Validator, jsonschema.Draft7Validator, jsonschema.Draft4Validator)


class _TooLongError(Exception):
    """A check that would take too long."""


class SchemaCheck:
    """Validates outputs by jsonschema. schema: with numbers as `schemas.read_json` gives them.

    Patterns are judged where every dialect means the same by them, in bounded time; formats are not judged. Raises
    RequestError for an invalid schema.
    """

    def __init__(self, schema: Any) -> None:
        dialect = _dialect(schema)
        self._lock = threading.Lock()
        self._left = 0
        functions = {**dialect.VALIDATORS, **OWN_FUNCTIONS}
        counted = {name: self._counted(function) for name, function in functions.items()}
        checker = dialect.TYPE_CHECKER.redefine("integer", _is_integer)
        made = validators.extend(dialect, counted, type_checker=checker)
        self._validator = made(schema, registry=Registry())  # nothing is fetched

    def error(self, text: str) -> str | None:
        """What is wrong with an output; None if it matches, or if it is too large to say."""
        try:
            last = read_json(text)
            first = read_json(text, lambda pairs: dict(reversed(pairs)))
        except ValueError as error:
            return f"it is not JSON ({told(error)})"
        except (RecursionError, ArithmeticError):  # nested too deeply, or a number with too large an exponent
            return None
        # Of two members with the same name some readers take the first.
        return self._error(last) or (self._error(first) if first != last else None)

    def _error(self, instance: Any) -> str | None:
        with self._lock:
            self._left = MOST_WORK
            try:
                error = next(iter(self._validator.iter_errors(instance)), None)
            except Exception:  # too long, too deep, or a reference to what is no schema
                return None
            return None if error is None else _sentence(error)

    def _counted(self, function: Any) -> Callable[..., Iterator[Any]]:
        def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
            self._left -= 1 + (len(value) if isinstance(value, list | dict) else 0)
            if self._left < 0:
                raise _TooLongError
            yield from function(validator, value, instance, schema) or ()

        return counted


def _dialect(schema: Any) -> Any:
    """The dialect that `$schema` names, or else the newest one, of those in which the schema is valid."""
    named = schema.get("$schema") if isinstance(schema, dict) else None
    known = validators.validator_for({"$schema": named}, default=None) if isinstance(named, str) else None
    errors = []
    for dialect in (*([] if known is None else [known]), *DIALECTS):
        error = _schema_error(dialect, schema)
        if error is None:
            return dialect
        errors.append(error)
    raise RequestError(f"it is no valid JSON schema: {errors[0]}")


def _schema_error(dialect: Any, schema: Any) -> str | None:
    checker = dialect.TYPE_CHECKER.redefine("integer", _is_integer)
    made = validators.extend(validators.validator_for(dialect.META_SCHEMA, default=dialect), type_checker=checker)
    try:
        error = jsonschema.exceptions.best_match(made(dialect.META_SCHEMA).iter_errors(schema))
    except RecursionError:
        return "it is nested too deeply"
    return None if error is None else _sentence(error)


def _sentence(error: jsonschema.ValidationError) -> str:
    where = "".join(f"[{step!r}]" for step in error.absolute_path)
    message = re.sub(r"Decimal\('([^']*)'\)", r"\1", error.message)
    return one_line(f"{message}{f' at {where}' if where else ''}", 300)


def _is_integer(_: Any, value: Any) -> bool:
    if isinstance(value, Decimal):
        return value.is_finite() and value == value.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)


def _multiple_of(validator: Any, factor: Any, instance: Any, _: Any) -> Iterator[Any]:
    if not validator.is_type(instance, "number"):
        return
    value = Decimal(instance)
    if value and abs(value.adjusted()) > MOST_EXPONENT:
        return
    digits = abs(value.adjusted()) + len(value.as_tuple().digits) + len(Decimal(factor).as_tuple().digits) + 400
    try:
        left = Context(prec=digits).remainder(value, Decimal(factor))
    except InvalidOperation:
        return
    if left:
        yield jsonschema.ValidationError(f"{instance} is not a multiple of {factor}")


def _found(pattern: str, text: str) -> bool | None:
    """Whether a pattern is found in a text; None if that cannot be said."""
    if not is_plain(pattern):
        return None
    try:
        return regex.search(for_python(pattern), text, regex.ASCII, timeout=PATTERN_SECONDS) is not None
    except (regex.error, TimeoutError):
        return None


def _pattern(validator: Any, pattern: str, instance: Any, _: Any) -> Iterator[Any]:
    if validator.is_type(instance, "string") and _found(pattern, instance) is False:
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: dict[str, Any], instance: Any, _: Any) -> Iterator[Any]:
    if validator.is_type(instance, "object"):
        for pattern, part in patterns.items():
            for name, value in instance.items():
                if _found(pattern, name):
                    yield from validator.descend(value, part, path=name, schema_path=pattern)


def _additional_properties(validator: Any, others: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(instance, "object"):
        return
    patterns = schema.get("patternProperties", {})
    named = schema.get("properties", {})
    for name, value in instance.items():
        if name not in named and all(_found(pattern, name) is False for pattern in patterns):
            for error in validator.descend(value, others, path=name):
                yield jsonschema.ValidationError(f"{name!r} is not allowed") if others is False else error


OWN_FUNCTIONS: Mapping[str, Callable[..., Iterator[Any]]] = MappingProxyType(
    {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "multipleOf": _multiple_of,
    }
)
