"""Follow one offloaded decode step of a tiny random model from `LLM` to the kernels: `python -m tools.walk`.

Prints the files and Python functions of the package that the step passes, in the order in which it first enters them,
and the extension functions that these call; then the sizes of the core and of its sides.

Counted is what a reader has to read: each function or method that the engine's thread enters, once however often it is
called, and each file with at least one of them. Not counted are what reads like a field (a property or `__len__` whose
body is one return statement), comprehensions and lambdas, which belong to the function around them, generated code
such as the `__init__` of a dataclass, and what the device's own threads run.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from nanovllm import LLM, SamplingParams
from tools.structure import PACKAGE, code_lines, print_sizes, side_of

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 199,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
PROMPT = list(range(1, 151))
ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "enable_cpu_offload": True,
    "kvcache_block_size": 16,
    "num_gpu_blocks": 4,
    "num_cpu_blocks": 40,
    "device": "cpu",
}


@cache
def fields_of(path: Path) -> frozenset[int]:
    """The first lines, decorators included, of the methods in a file that read like a field."""
    return frozenset(
        min(part.lineno for part in (node, *node.decorator_list))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and is_field(node)
    )


def is_field(node: ast.FunctionDef) -> bool:
    """Whether a method is a property or `__len__` of one return statement."""
    decorators = {part.id for part in node.decorator_list if isinstance(part, ast.Name)}
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    is_read = node.name == "__len__" or not decorators.isdisjoint(("property", "cached_property"))
    return is_read and len(body) == 1 and isinstance(body[0], ast.Return)


class Walk:
    """A profile function that notes each counted function of the package at its first call."""

    def __init__(self) -> None:
        self.functions: dict[Path, list[str]] = {}
        self.kernels: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE not in path.parents:
            return
        code = frame.f_code
        if event == "call" and "<" not in code.co_name and code.co_firstlineno not in fields_of(path):
            names = self.functions.setdefault(path, [])
            name = code.co_qualname
            if name not in names:
                names.append(name)
        elif event == "c_call":
            module = getattr(argument, "__module__", None) or type(getattr(argument, "__self__", None)).__module__
            name = f"{module}.{argument.__name__}"
            if str(module).startswith("nanovllm") and name not in self.kernels:
                self.kernels.append(name)


def walk_decode_step(model: Path, *, cpu_attention: bool) -> Walk:
    """Trace the third decode step of a prompt of which most KV blocks are on the host."""
    walk = Walk()
    with LLM(model, cpu_attention=cpu_attention, **ENGINE) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        outputs = llm.stream(PROMPT, params)
        while len(next(outputs).outputs[0].token_ids) < 3:
            pass
        sys.setprofile(walk)
        try:
            next(outputs)
        finally:
            sys.setprofile(None)
        outputs.close()
    return walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu-attention", action="store_true", help="let the CPU attend to host blocks")
    parser.add_argument("--brief", action="store_true", help="print totals only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(CONFIG))
        walk = walk_decode_step(model, cpu_attention=args.cpu_attention)
    for path, names in walk.functions.items():
        if not args.brief:
            side = side_of(path)
            print(f"{path.relative_to(PACKAGE.parent)}{f' (side: {side})' if side else ''}")
            print("".join(f"    {name}\n" for name in names), end="")
    if not args.brief:
        print("extension functions\n" + "".join(f"    {name}\n" for name in walk.kernels), end="")
    num_functions = sum(len(names) for names in walk.functions.values())
    lines = sum(map(code_lines, walk.functions))
    print(f"one offloaded decode step passes {len(walk.functions)} files with {lines:,} lines of code and "
          f"{num_functions} functions, and calls {len(walk.kernels)} extension functions")  # fmt: skip
    print()
    print_sizes()


if __name__ == "__main__":
    main()
