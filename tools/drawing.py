"""Draw the packages and their imports as a Mermaid diagram: `python -m tools.drawing [PACKAGE] > docs/structure.mmd`.

A box is a package or file directly under PACKAGE, with its files and lines of code. An arrow is an import at run time,
also one within a function; an import that follows from others is left out. Files that import no package are one box.
The first line counts rooms (packages and files, the plain ones each), floors (the longest chain of imports) and all
arrows between rooms.
"""

from __future__ import annotations

import argparse
import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tools.count import ROOT, code_lines

PLAIN = "plain data"
Imports = dict[str, set[str]]


def imported_modules(node: ast.AST) -> set[str]:
    """The dotted names that a module imports, `from a import b` as a.b, but for those of TYPE_CHECKING."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return set()
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for child in ast.iter_child_nodes(node) for name in imported_modules(child)}


def box_of(path: Path, package: Path) -> str:
    """The name of the package or file directly under `package` that the path belongs to."""
    return path.relative_to(package).parts[0].removesuffix(".py")


def box_imports(files: list[Path], package: Path) -> Imports:
    """For each box the boxes that it imports. The package's own `__init__` and `__main__` only start the rest."""
    boxes: Imports = {box_of(path, package): set() for path in files}
    for path in files:
        for name in imported_modules(ast.parse(path.read_text())):
            parts = name.split(".")
            if parts[0] == package.name and len(parts) > 1 and parts[1] in boxes:
                boxes[box_of(path, package)].add(parts[1])
    return {box: imported - {box} for box, imported in boxes.items()}


def plain_files(imports: Imports, package: Path) -> set[str]:
    """The files that import nothing but one another."""
    plain: set[str] = set()
    while more := {box for box in imports if (package / f"{box}.py").is_file() and imports[box] <= plain} - plain:
        plain |= more
    return plain


def without_implied(imports: Imports) -> Imports:
    """The same order with the fewest arrows: no import of what an imported box imports, directly or not."""
    reached: Imports = {}

    def reach(box: str) -> set[str]:
        if box not in reached:
            reached[box] = set()  # ends a cycle
            reached[box] = imports[box].union(*(reach(other) for other in imports[box]))
        return reached[box]

    return {
        box: {to for to in imported if not any(to in reach(by) for by in imported - {to})}
        for box, imported in imports.items()
    }


def floors(imports: Imports) -> str:
    """The rooms on the longest chain of imports, or those of a cycle, which has no floors."""
    sorter = TopologicalSorter(imports)
    count = 0
    try:
        sorter.prepare()
    except CycleError as error:
        return f"in a cycle ({' -> '.join(error.args[1])})"
    while sorter.is_active():
        sorter.done(*sorter.get_ready())
        count += 1
    return f"on {count} floors"


def draw(package: Path) -> str:
    """The diagram of a package directory."""
    files = [path for path in sorted(package.rglob("*.py")) if box_of(path, package) not in ("__init__", "__main__")]
    imports = box_imports(files, package)
    plain = plain_files(imports, package)
    group = {box: PLAIN if box in plain else box for box in imports}
    grouped: Imports = {name: set() for name in group.values()}
    for box, imported in imports.items():
        grouped[group[box]] |= {group[other] for other in imported} - {group[box]}
    sizes = {name: [0, 0] for name in grouped}
    for path in files:
        size = sizes[group[box_of(path, package)]]
        size[0] += 1
        size[1] += code_lines(path)
    ids = {name: name.replace(" ", "_") for name in grouped}
    arrows = sum(map(len, imports.values()))
    lines = [f"%% {len(imports)} rooms {floors(imports)}, {arrows} arrows", "flowchart TB"]
    for name, (files_in, code) in sorted(sizes.items()):
        lines.append(f'    {ids[name]}["{name}<br/>{files_in} file{"s" * (files_in > 1)}, {code:,} lines"]')
    for name, imported in sorted(without_implied(grouped).items()):
        lines += [f"    {ids[name]} --> {ids[other]}" for other in sorted(imported)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", nargs="?", type=Path, default=ROOT / "nanovllm")
    print(draw(parser.parse_args().package.resolve()), end="")
