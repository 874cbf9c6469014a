"""The tables of docs/arguments.md and docs/sampling.md, from the dataclasses: `python -m tools.arguments`.

The table of a page is between two comments, and all else of the page is written by hand.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.sampling_params import SamplingParams

DOCS = Path(__file__).parents[1] / "docs"
PAGES: Mapping[str, Any] = {"arguments.md": EngineConfig, "sampling.md": SamplingParams}
BEGIN = "<!-- written by tools.arguments -->\n"
END = "<!-- end -->\n"
BAR = r"\|"  # within a cell


def table(described: Any) -> str:
    """A row for each field: name, type, default and meaning, with what the class's docstring adds."""
    details = _details(described)
    rows = ["| name | type | default | meaning |\n|---|---|---|---|\n"]
    for field in fields(described):
        more = details.get(field.name, "")
        meaning = field.metadata["help"] + (f". {more[0].upper()}{more[1:].removesuffix('.')}" if more else "")
        cells = [f"`{field.name}`", f"`{field.type}`", _default(field), meaning]
        rows.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |\n")
    return "".join(rows)


def _default(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        return "{}"
    if field.default is MISSING:
        return ""
    return field.default.name if isinstance(field.default, Enum) else repr(field.default)


def _details(described: Any) -> dict[str, str]:
    """What the docstring says of single fields, after its "below:", as `name, name: text`."""
    text = " ".join((inspect.getdoc(described) or "").partition("below:")[2].split())
    name = f"(?:{'|'.join(field.name for field in fields(described))})"
    _, *parts = re.split(rf"(?:^|(?<=\.) )({name}(?:, {name})*): ", text)
    return {one: said for names, said in zip(parts[::2], parts[1::2], strict=True) for one in names.split(", ")}


def page(text: str, described: Any) -> str:
    """The text of a page with its table written anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(described)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Write both tables."""
    for name, described in PAGES.items():
        path = DOCS / name
        path.write_text(page(path.read_text(encoding="utf-8"), described), encoding="utf-8")


if __name__ == "__main__":
    main()
