"""Numbers of JSON schemas: what the grammar library reads exactly, and what it is given instead of the rest.

The library reads numbers as doubles, decimals of many digits not even as the nearest one, and writes integers by
64-bit arithmetic.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, localcontext
from typing import Any

EXACT = 2**53  # whole numbers up to this are doubles
WIDEST = 2**63 - 1024  # the largest double that fits into 64 bits
MOST_DIGITS = 15  # of a decimal that is read exactly
MOST_DECIMALS = 22
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
Number = int | float | Decimal


def is_number(value: object) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def plain(value: Number) -> int | Decimal:
    """A number of JSON as a whole number where it is one of moderate size, or else as a decimal."""
    if isinstance(value, int):
        return value
    exact = Decimal(repr(value)) if isinstance(value, float) else value
    return int(exact) if exact.adjusted() < 400 and exact == exact.to_integral_value() else exact


def is_exact(value: Number) -> bool:
    """Whether the library writes a constant as this number and no other."""
    number = plain(value)
    if isinstance(number, int):
        return abs(number) <= EXACT
    _, digits, exponent = number.normalize(Context(prec=5000)).as_tuple()
    return len(digits) <= MOST_DIGITS and isinstance(exponent, int) and 0 <= -exponent <= MOST_DECIMALS


def all_exact(value: Any) -> bool:
    """`is_exact` for every number of a JSON value."""
    if isinstance(value, dict):
        return all(map(all_exact, value.values()))
    if isinstance(value, list):
        return all(map(all_exact, value))
    return not is_number(value) or is_exact(value)


def whole_bounds(schema: dict[str, Any]) -> tuple[int | None, int | None]:
    """The least and greatest whole number that the bounds of a schema allow; None for no bound."""
    lows = [_ceiling(schema["minimum"])] if "minimum" in schema else []
    highs = [_floor(schema["maximum"])] if "maximum" in schema else []
    if "exclusiveMinimum" in schema:
        lows.append(_floor(schema["exclusiveMinimum"]) + 1)
    if "exclusiveMaximum" in schema:
        highs.append(_ceiling(schema["exclusiveMaximum"]) - 1)
    return max(lows, default=None), min(highs, default=None)


def _floor(value: Number) -> int:
    return math.floor(plain(value))


def _ceiling(value: Number) -> int:
    return math.ceil(plain(value))


def narrowed(schema: dict[str, Any], whole: bool) -> dict[str, Any]:
    """The schema with bounds that the library keeps: the same, or the next ones inside that it reads exactly.

    whole: the schema allows no numbers but whole ones. Raises ValueError if nothing is left.
    """
    if not any(name in schema for name in BOUNDS):
        return schema
    rest = {name: value for name, value in schema.items() if name not in BOUNDS}
    return rest | (_narrowed_whole(schema) if whole else _narrowed_decimal(schema))


def _narrowed_whole(schema: dict[str, Any]) -> dict[str, Any]:
    low, high = whole_bounds(schema)
    bounds: dict[str, Any] = {}
    if low is not None:
        bounds["minimum"] = max(_inward(low, up=True), -WIDEST)
        if low > 10**17 and high is None:
            high = WIDEST
    if high is not None:
        bounds["maximum"] = min(_inward(high, up=False), WIDEST)
        if high < -(10**17) and low is None:
            bounds["minimum"] = -WIDEST
    return _checked(bounds)


def _inward(value: int, up: bool) -> int:
    """The nearest double that is no less, or no greater, than a whole number; at most 64 bits."""
    if abs(value) <= EXACT:
        return value
    if abs(value) > WIDEST:
        return (WIDEST + 1 if value > 0 else -WIDEST) if up else (WIDEST if value > 0 else -WIDEST - 1)
    near = int(float(value))
    if (near < value) if up else (near > value):
        near = int(math.nextafter(float(value), math.inf if up else -math.inf))
    return near


def _narrowed_decimal(schema: dict[str, Any]) -> dict[str, Any]:
    bounds: dict[str, Any] = {}
    for name, up in (("minimum", True), ("exclusiveMinimum", True), ("maximum", False), ("exclusiveMaximum", False)):
        if name in schema:
            value = plain(schema[name])
            bound: Any = _rounded(value, up)
            # A bound that moved inside belongs to the numbers that are allowed.
            inside = name if bound == value else "minimum" if up else "maximum"
            pick = max if up else min
            bounds[inside] = pick(bounds[inside], bound) if inside in bounds else bound
    _checked(bounds)
    low = bounds.get("exclusiveMinimum")
    high = bounds.get("exclusiveMaximum")
    # The library takes 0 itself for a number that is more than 0 and less than 1.
    if low == 0 and min(bounds.get("maximum", 1), bounds.get("exclusiveMaximum", 1)) < 1:
        least = min(bounds.get("maximum", 1), bounds.get("exclusiveMaximum", 1)) / Decimal(10**6)
        bounds["minimum"] = max(bounds.get("minimum", 0), _rounded(min(least, Decimal("1e-15")), up=True))
        del bounds["exclusiveMinimum"]
    if high == 0 and max(bounds.get("minimum", -1), bounds.get("exclusiveMinimum", -1)) > -1:
        most = max(bounds.get("minimum", -1), bounds.get("exclusiveMinimum", -1)) / Decimal(10**6)
        bounds["maximum"] = min(bounds.get("maximum", 0), _rounded(max(most, Decimal("-1e-15")), up=False))
        del bounds["exclusiveMaximum"]
    return _checked(bounds)


def _rounded(value: int | Decimal, up: bool) -> int | Decimal:
    """The number, or the next one above or below it that the library reads exactly."""
    if isinstance(value, int) and abs(value) < WIDEST:
        return _inward(value, up)
    with localcontext(Context(prec=MOST_DIGITS, rounding=ROUND_CEILING if up else ROUND_FLOOR)) as context:
        if value >= WIDEST or value <= -WIDEST:
            return _inward(value if isinstance(value, int) else 2 * WIDEST * (1 if value > 0 else -1), up)
        rounded = context.create_decimal(value)
    if int(rounded.as_tuple().exponent) < -MOST_DECIMALS:
        rounded = rounded.quantize(Decimal(1).scaleb(-MOST_DECIMALS), ROUND_CEILING if up else ROUND_FLOOR)
    return plain(rounded)


def _checked(bounds: dict[str, Any]) -> dict[str, Any]:
    low: Any = max((bounds[name] for name in ("minimum", "exclusiveMinimum") if name in bounds), default=-WIDEST)
    high: Any = min((bounds[name] for name in ("maximum", "exclusiveMaximum") if name in bounds), default=WIDEST)
    is_open = low == bounds.get("exclusiveMinimum") or high == bounds.get("exclusiveMaximum")
    if low > high or (low == high and is_open) or low > WIDEST or high < -WIDEST:
        raise ValueError("no number within its bounds can be written exactly")
    return bounds


def whole_pattern(low: int | None, high: int | None) -> str:
    """A regular expression for the whole numbers from low to high, in their usual spelling."""
    parts = []
    if low is None or low < 0:
        parts.append(f"-({_natural(1 if high is None else max(1, -high), None if low is None else -low)})")
    if high is None or high >= 0:
        parts.append(_natural(max(0, low or 0), high))
    return "|".join(parts)


def _natural(low: int, high: int | None) -> str:
    """For whole numbers from low, at least 0, to high."""
    first = str(low)
    last = None if high is None else str(high)
    if last is None:
        return f"{_between(first, '9' * len(first))}|[1-9][0-9]{{{len(first)},}}"
    if len(first) == len(last):
        return _between(first, last)
    longer = [_between(first, "9" * len(first)), _between("1" + "0" * (len(last) - 1), last)]
    if len(last) - len(first) > 1:
        longer.append(f"[1-9][0-9]{{{len(first)},{len(last) - 2}}}")
    return "|".join(longer)


def _between(first: str, last: str) -> str:
    """For texts of as many digits as first and last, from one to the other."""
    same = 0
    while same < len(first) and first[same] == last[same]:
        same += 1
    if same == len(first):
        return first
    rest = len(first) - same - 1
    a = int(first[same])
    b = int(last[same])
    parts = []
    if first[same + 1 :].strip("0"):
        parts.append(f"{a}({_between(first[same + 1 :], '9' * rest)})")
        a += 1
    if last[same + 1 :].strip("9"):
        parts.append(f"{b}({_between('0' * rest, last[same + 1 :])})")
        b -= 1
    if a <= b:
        parts.append(f"[{a}-{b}][0-9]{{{rest}}}")
    return f"{first[:same]}({'|'.join(parts)})"
