"""Count a tree: `python -m tools.count [DIR]`.

Prints files, lines of code and lines of each part of the package; the lines of tests and README; and what one request
passes from `LLM(...)` to the kernels and back to text, once with all of its KV blocks on the device and once with most
of them on the host: the files, their lines of code, and the functions that ran, by file. A part is a package directly
under nanovllm, or within apps, features and formats. Lines of code have no blank lines, comments and docstrings.

A file counts as passed if one of its functions ran while the engine was made or generated, in whatever thread, or if
one of its dataclasses was made. Code that runs when a module is imported does not count. DIR may be another tree, such
as an earlier commit with its extensions built: it runs in a process of its own. PYTHONPATH need not be set.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DIVIDED = ("apps", "features", "formats")  # packages whose own packages are counted each
PLACEMENTS: dict[str, dict[str, Any]] = {
    "resident": {"num_gpu_blocks": 16},
    "offloaded": {"enable_cpu_offload": True, "num_gpu_blocks": 4, "num_cpu_blocks": 40},
}
ENGINE: dict[str, Any] = {"device": "cpu", "kvcache_block_size": 16, "max_num_batched_tokens": 64, "max_model_len": 256}
PROMPT = "The quick brown fox jumps over the lazy dog. " * 3
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# of the hops
START = "LLM.generate"
END = "Scheduler.add"


def code_lines(path: Path) -> int:
    """Lines of a Python file without blank lines, comments and docstrings."""
    text = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(number not in docstrings and line.strip()[:1] not in ("", "#") for number, line in lines)


def part_of(path: Path, package: Path) -> str:
    """The part of the package that a file belongs to; its own name for a file directly under `package`."""
    parts = path.relative_to(package).parts
    return "/".join(parts[: 2 if parts[0] in DIVIDED else 1]).removesuffix(".py")


class Trace:
    """A profile function that notes the functions of a package in the order in which they first ran."""

    def __init__(self, package: Path) -> None:
        self.functions: dict[Path, list[str]] = {}
        self.hops: list[str] = []
        self._package = package
        self._seen: set[Any] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_qualname == END and not self.hops:
            self.hops = self._functions_above(frame)
        if code.co_filename == "<string>" and code.co_name == "__init__":  # of a dataclass
            self._note(type(frame.f_locals["self"]), type(frame.f_locals["self"]).__qualname__)
        elif "<" not in code.co_name and code.co_flags & CO_OPTIMIZED:  # not the body of a class
            self._note(code, code.co_qualname)

    def _note(self, what: Any, name: str) -> None:
        if what in self._seen:
            return
        self._seen.add(what)
        if isinstance(what, type):
            path = Path(getattr(sys.modules.get(what.__module__), "__file__", None) or "")
        else:
            path = Path(what.co_filename)
        if self._package in path.parents:
            names = self.functions.setdefault(path, [])
            if name not in names:
                names.append(name)

    def _functions_above(self, frame: FrameType | None) -> list[str]:
        """The package's functions on the stack, from START to this one, each once."""
        names: list[str] = []
        while frame is not None:
            name = frame.f_code.co_qualname
            ours = self._package in Path(frame.f_code.co_filename).parents and "<" not in frame.f_code.co_name
            if ours and name not in names:
                names.append(name)
            frame = None if name == START else frame.f_back
        return names[::-1]


def trace_request(model: str, placement: str) -> None:
    """Generate with the nanovllm that Python finds, and print as JSON what it passed."""
    import nanovllm

    trace = Trace(Path(nanovllm.__file__).parent)
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        with nanovllm.LLM(model, **ENGINE, **PLACEMENTS[placement]) as llm:
            params = nanovllm.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            outputs = llm.generate(PROMPT, params, use_tqdm=False)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert outputs[0].outputs[0].text, "the tokenizer has made no text"
    passed = {str(path): names for path, names in trace.functions.items()}
    print(json.dumps({"functions": passed, "hops": trace.hops}))


def traces(tree: Path) -> dict[str, dict[str, Any]]:
    """What a request passes in the nanovllm of `tree`, by placement, with a checkpoint of random weights."""
    from benchmarks.peers.checkpoint import make_checkpoint
    from benchmarks.shapes import open_shape
    from benchmarks.tiny import write_tiny_config

    by_placement = {}
    with tempfile.TemporaryDirectory() as directory:
        with open_shape(str(write_tiny_config(Path(directory) / "config")), None, "float32") as shape:
            model = make_checkpoint(shape, Path(directory) / "model", seed=0)
        for placement in PLACEMENTS:
            command = [sys.executable, __file__, "--trace", str(model), placement]
            environment = os.environ | {"PYTHONPATH": str(tree), "NANOVLLM_CPU_KERNELS": "default"}
            done = subprocess.run(command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True)
            if done.returncode != 0:
                raise SystemExit(f"count: the nanovllm of {tree} did not generate: see its message above.")
            by_placement[placement] = json.loads(done.stdout.splitlines()[-1])
    return by_placement


def print_sizes(package: Path) -> None:
    """Print files, lines of code and lines of each part of the package and of its divided packages."""
    parts: dict[str, list[Path]] = defaultdict(list)
    for path in package.rglob("*.py"):
        part = part_of(path, package)
        part = part if "/" in part or (package / part).is_dir() else "(files)"
        for name in {part, part.split("/")[0]}:
            parts[name].append(path)
    print(f"{'':<34}{'files':>6}{'code':>8}{'lines':>8}")
    for name, files in sorted(parts.items()):
        print_files(f"  {name}" if "/" in name else name, files)
    print_files("package", package.rglob("*.py"))


def print_files(name: str, files: Iterable[Path]) -> None:
    files = list(files)
    lines = sum(len(path.read_text().splitlines()) for path in files)
    print(f"{name:<34}{len(files):>6,}{sum(map(code_lines, files)):>8,}{lines:>8,}")


def print_spine(by_placement: dict[str, dict[str, Any]], package: Path, brief: bool) -> None:
    """Print the files that a request passes, with their functions unless `brief`, and the hops."""
    together: dict[Path, list[str]] = {}
    for placement, trace in by_placement.items():
        paths = [Path(path) for path in trace["functions"]]
        for path in paths:
            names = together.setdefault(path, [])
            names += [name for name in trace["functions"][str(path)] if name not in names]
        print_passed(f"spine, {placement}", {path: trace["functions"][str(path)] for path in paths}, package)
    print_passed("spine, both", together, package)
    hops = by_placement["resident"]["hops"]
    print(f"hops from {START} to {END}: {len(hops)} functions: {' -> '.join(hops)}")
    if not brief:
        for path, names in together.items():
            print(f"\n{path.relative_to(package.parent)}, {code_lines(path)} lines of code")
            print("".join(f"    {name}\n" for name in names), end="")


def print_passed(title: str, functions: dict[Path, list[str]], package: Path) -> None:
    of_features = [path for path in functions if part_of(path, package).split("/")[0] == "features"]
    num_functions = sum(map(len, functions.values()))
    print(
        f"{title}: {len(functions)} files with {sum(map(code_lines, functions)):,} lines of code, {num_functions}"
        f" functions of them ran; of these in features: {len(of_features)} files with"
        f" {sum(map(code_lines, of_features)):,} lines"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", nargs="?", type=Path, default=ROOT, metavar="DIR", help="(default: this tree)")
    parser.add_argument("--brief", action="store_true", help="leave the list of functions out")
    parser.add_argument("--trace", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trace:
        trace_request(*args.trace)
        return
    tree = args.tree.resolve()
    package = tree / "nanovllm"
    print_sizes(package)
    for name in ("tests", "benchmarks", "tools"):
        print_files(name, (tree / name).rglob("*.py"))
    print(f"{'README.md':<48}{len((tree / 'README.md').read_text().splitlines()):>8,}\n")
    print_spine(traces(tree), package, args.brief)


if __name__ == "__main__":
    main()
