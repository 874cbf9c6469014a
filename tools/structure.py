"""Which files of the package are core and which belong to sides, and how many lines of code they have."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "nanovllm"

# The files of each side, relative to the package: deleting them leaves the rest working.
SIDES: dict[str, tuple[str, ...]] = {
    "CUDA graphs": ("cuda_graphs",),
    "layer-by-layer prefill": ("layerwise_prefill",),
    "CPU attention": ("cpu_attention",),
    "groups of sequences": ("sequence_groups",),
    "tensor parallelism": ("distributed",),
    "chat templates": ("chat_template",),
    "planner": ("planner", "cli/plan.py", "cli/planning.py", "cli/local_machine.py"),
    "quantized weights": ("quantization",),
    "GGUF": ("gguf",),
    "structured outputs": ("structured_outputs",),
    "LoRA": ("lora",),
    "CUDA device": ("device/cuda.py", "device/cuda_graph.py", "device/pinned.py"),
    "trace": ("device/trace.py", "device/trace_blocks.py"),
    "ordering check": ("device/ordering.py",),
    "progress": ("progress_bar.py",),
    "server": ("server", "cli/serve.py"),
    "batches": ("batch", "cli/batch.py"),
    "command line": ("cli", "__main__.py"),
    "vLLM's API": ("vllm_api",),
    "vLLM's names": ("vllm_names.py",),
    "recall and demo": ("recall", "demo.py"),
    "SmolLM2": ("smollm2",),
}

# The other sides that a side imports. All other sides work without each other.
NEEDS: dict[str, tuple[str, ...]] = {
    "planner": ("CPU attention", "command line"),
    "batches": ("command line", "progress"),
    "command line": ("progress", "vLLM's names"),
    "server": ("chat templates", "command line", "progress", "vLLM's API"),
    "recall and demo": ("SmolLM2",),
}


def side_of(path: Path) -> str | None:
    """The side that a file of the package belongs to; None for the core."""
    relative = path.relative_to(PACKAGE)
    for side, parts in SIDES.items():
        if any(relative == Path(part) or Path(part) in relative.parents for part in parts):
            return side
    return None


def code_lines(path: Path) -> int:
    """Lines of a Python file without blank lines, comments and docstrings."""
    text = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(number not in docstrings and line.strip()[:1] not in ("", "#") for number, line in lines)


def print_sizes() -> None:
    """Print files, lines and lines of code of the core's packages and of each side."""
    sizes: dict[str, list[int]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parts[0]
        side = side_of(path)
        for name in ("core", f"  {package}") if side is None else ("sides", f"  {side}"):
            size = sizes.setdefault(name, [0, 0, 0])
            size[0] += 1
            size[1] += len(path.read_text().splitlines())
            size[2] += code_lines(path)
    print(f"{'':<28}{'files':>6}{'lines':>8}{'code':>8}")
    for part, is_side in (("core", False), ("sides", True)):
        names = {f"  {side}" for side in SIDES}
        rows = [name for name in sizes if name.startswith("  ") and (name in names) == is_side]
        for name in (part, *rows):
            files, lines, code = sizes[name]
            print(f"{name:<28}{files:>6}{lines:>8,}{code:>8,}")
