"""The structure of the package: which module imports which, the core without its sides, and no module-level state."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from engines import greedy, offloaded, random_prompt, token_ids

import nanovllm
from tools.structure import NEEDS, SIDES, side_of

PACKAGE = Path(nanovllm.__file__).parent
TORCH_FREE = (
    "nanovllm",
    "nanovllm.batch",
    "nanovllm.batch.results",
    "nanovllm.batch.run",
    "nanovllm.cli.batch",
    "nanovllm.cli.bench",
    "nanovllm.cli.chat",
    "nanovllm.cli.generate",
    "nanovllm.chat_template",
    "nanovllm.cli.main",
    "nanovllm.cli.plan",
    "nanovllm.config",
    "nanovllm.errors",
    "nanovllm.fast_tokenizer",
    "nanovllm.tokenizer_classes",
    "nanovllm.memory_checks",
    "nanovllm.model_files.json_fields",
    "nanovllm.outputs",
    "nanovllm.sampling_params",
    "nanovllm.tokenizer",
    "nanovllm.kvcache.block_size",
    "nanovllm.kvcache.budget",
    "nanovllm.cpu_attention.shares",
    "nanovllm.kvcache.fitting",
    "nanovllm.kvcache.hybrid_manager",
    "nanovllm.kvcache.layout",
    "nanovllm.kvcache.layerwise",
    "nanovllm.layerwise_prefill.plan",
    "nanovllm.layerwise_prefill.schedule",
    "nanovllm.lora.request",
    "nanovllm.kvcache.sizing",
    "nanovllm.structured_outputs",
    "nanovllm.models.sharding",
    "nanovllm.cli.planning",
    "nanovllm.layers.row_limits",
    "nanovllm.planner.activations",
    "nanovllm.planner.network",
    "nanovllm.planner.plan",
    "nanovllm.planner.report",
    "nanovllm.planner.units",
    "nanovllm.sequence_groups",
)
NEEDS_TORCH = {
    "nanovllm.engine.execution_order",
    "nanovllm.engine.meta_results",
    "nanovllm.engine.model_runner",
    "nanovllm.engine.profiling",
    "nanovllm.engine.scoring",
}

# From the bottom up. A unit is a file or a package directly under nanovllm; "" is the package's own __init__.
ROWS: tuple[set[str], ...] = (
    {"errors", "side_modules", "tokenizer_classes"},
    {"fast_tokenizer", "memory_checks", "model_files", "vllm_arguments", "worker_process"},
    {"config", "outputs", "tokenizer", "vllm_names"},
    {"sampling_rules"},
    {"sampling_params"},
    {"prompts"},
    {"chat_template"},
    {"ops", "comm"},
    {"device", "layers"},
    {"forward_context"},
    {"kvcache", "models", "quantization"},
    {"cpu_attention", "gguf"},
    {"cuda_graphs", "planner"},
    {"engine"},
    {"distributed", "layerwise_prefill", "lora", "sequence_groups", "structured_outputs"},
    {"progress_bar"},
    {"vllm_api"},
    {"model_engine"},
    {"llm", "recall"},
    {""},
    {"batch", "smollm2", "server"},
    {"demo", "cli"},
    {"__main__"},
)


def module_name(path: Path) -> str:
    parts = ("nanovllm", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
EXTENSIONS = {module_name(path) for path in PACKAGE.rglob("*.pyi")}


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all that a module imports, `from a import b` as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


class WithoutTypeChecking(ast.NodeTransformer):
    """Removes what is imported for annotations only."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else node


def own_imports(name: str, *, at_run_time: bool = False) -> set[str]:
    """The modules of this package that a module imports, inside functions too."""
    found = set()
    tree: ast.AST = ast.parse(MODULES[name].read_text())
    if at_run_time:
        tree = WithoutTypeChecking().visit(tree)
    for imported in imported_names(tree):
        while imported and imported not in MODULES and imported not in EXTENSIONS:  # a name within a module
            imported = imported.rpartition(".")[0]
        if imported:
            found.add(imported)
    return found - {name}


IMPORTS = {name: own_imports(name) for name in MODULES if name != "nanovllm"}  # the root loads its names on first use


def unit(name: str) -> str:
    return name.removeprefix("nanovllm").removeprefix(".").partition(".")[0]


def row(name: str) -> int:
    for index, units in enumerate(ROWS):
        if unit(name) in units:
            return index
    raise AssertionError(f"{name} is in none of ROWS: add it")


@pytest.mark.parametrize("name", sorted(IMPORTS))
def test_imports_go_down_only(name: str) -> None:
    for imported in IMPORTS[name]:
        same_unit = unit(imported) == unit(name)
        assert same_unit or row(imported) < row(name), f"{name} imports {imported}, which is not below it"


def test_no_import_cycles() -> None:
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        raise AssertionError(f"modules import each other: {' -> '.join(error.args[1])}") from error


# ---- the core and its sides

CORE = sorted(name for name, path in MODULES.items() if side_of(path) is None and name != "nanovllm")


@pytest.mark.parametrize("name", CORE)
def test_the_core_imports_no_side(name: str) -> None:
    imports = own_imports(name, at_run_time=True) & MODULES.keys()  # without extension modules
    sides = {imported: side_of(MODULES[imported]) for imported in imports}
    assert not {imported: side for imported, side in sides.items() if side is not None}


# An editable install would find in the checkout what the copy lacks.
ONLY_THE_COPY = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
"""
SIDE_MODULES = sorted(name for name, path in MODULES.items() if side_of(path) is not None)


@pytest.mark.parametrize("name", SIDE_MODULES)
def test_a_side_imports_no_side_that_it_does_not_name(name: str) -> None:
    own = side_of(MODULES[name])
    imported = {side_of(MODULES[other]) for other in own_imports(name, at_run_time=True) & MODULES.keys()}
    assert own is not None and imported <= {None, own, *NEEDS.get(own, ())}


# Torch (and _dynamo, which kernels for meta tensors import) and Transformers are imported once; then every copy of the
# package gets a process of its own.
GENERATE = (
    ONLY_THE_COPY
    + """
import importlib, json, os, traceback
from pathlib import Path
import torch._dynamo, transformers

def generate(folder, work):
    sys.path.insert(0, folder)
    from nanovllm import LLM, SamplingParams
    for name in work["core"]:
        importlib.import_module(name)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    found = []
    for arguments in work["engines"]:
        with LLM(work["model"], device="cpu", **arguments) as llm:
            found += [output.outputs[0].token_ids for output in llm.generate(work["prompts"], params, use_tqdm=False)]
    loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] == "nanovllm"]
    assert all(Path(module.__file__).is_relative_to(folder) for module in loaded), loaded
    assert found == work["expected"], found

work = json.load(sys.stdin)
for folder in work["folders"]:
    if (child := os.fork()) == 0:
        try:
            generate(folder, work)
        except BaseException:
            Path(folder, "error").write_text(traceback.format_exc())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        Path(folder, "error").write_text(f"the process ended with wait status {status}")
"""
)
ENGINES = [{"kvcache_block_size": 16, "num_gpu_blocks": 40}, offloaded(16, 4, 60, max_num_batched_tokens=32)]


def copy_without(sides: Iterable[str], folder: Path) -> None:
    """A copy of the package without the files of some sides, with compiled files so that nothing is compiled anew."""
    package = folder / "nanovllm"
    shutil.copytree(PACKAGE, package)
    for part in (part for side in sides for part in SIDES[side]):
        path = package / part
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.slow
def test_the_core_generates_without_any_side_and_all_others_without_one(tmp_path: Path) -> None:
    """Without the files of some sides the core is importable, and generates the tokens of the complete package."""
    make_checkpoint(tmp_path / "model")
    prompts = [random_prompt(length, 199, 1) for length in (150, 7)]
    expected: list[list[int]] = []
    for arguments in ENGINES:
        with nanovllm.LLM(tmp_path / "model", device="cpu", **arguments) as llm:
            expected += token_ids(llm, prompts, greedy(6))
    without: dict[str, Iterable[str]] = {"any side": SIDES, **{side: [side] for side in SIDES}}
    for name, sides in without.items():
        copy_without(sides, tmp_path / name)
    work = {
        "folders": [str(tmp_path / name) for name in without],
        "model": str(tmp_path / "model"),
        "core": CORE,
        "engines": ENGINES,
        "prompts": prompts,
        "expected": expected,
    }
    subprocess.run([sys.executable, "-c", GENERATE], cwd=tmp_path, input=json.dumps(work), text=True, check=True)
    errors = {path.parent.name: path.read_text() for path in tmp_path.glob("*/error")}
    assert not errors, "\n\n".join(f"without {name}:\n{error}" for name, error in errors.items())


CORE_TESTS = ("scheduler", "block_manager", "block_tiers", "detokenizer", "guard", "text", "chunked_attention")


@pytest.mark.slow
def test_the_tests_of_the_core_pass_without_any_side(tmp_path: Path) -> None:
    copy_without(SIDES, tmp_path)
    shutil.copytree(Path(__file__).parent, tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    tests = [f"tests/test_{name}.py" for name in CORE_TESTS]
    run = f"{ONLY_THE_COPY}\nimport pytest\nsys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", run, "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), *tests]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---- what works without torch and without triton

BLOCKED = """
import importlib, sys
blocked = sys.argv[1]
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == blocked:
            raise ImportError(blocked + " is blocked")
sys.meta_path.insert(0, Blocker())
try:
    importlib.import_module(blocked)
except ImportError:
    pass
else:
    raise AssertionError("the blocker does not block")
for name in sys.argv[2:]:
    importlib.import_module(name)
assert blocked not in sys.modules
"""


def import_without(blocked: str, names: Iterable[str]) -> None:
    arguments = [sys.executable, "-c", BLOCKED, blocked, *names]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr


def test_engine_and_sizes_import_without_torch() -> None:
    engine = {name for name in MODULES if unit(name) == "engine"} - NEEDS_TORCH
    assert len(engine) >= 5
    import_without("torch", [*TORCH_FREE, *sorted(engine)])


@pytest.mark.slow
def test_everything_but_its_kernels_imports_without_triton() -> None:
    kernels = {name for name in MODULES if "import triton\n" in MODULES[name].read_text()}
    assert len(kernels) >= 4 and all(name.startswith("nanovllm.ops.triton_") for name in kernels)
    # Imported only where Triton runs.
    users = kernels | {"nanovllm.ops.triton_attention", "nanovllm.lora.grouped_adapters"} & set(MODULES)
    users |= set() if find_spec("ray") else {"nanovllm.batch.ray_cluster", "nanovllm.batch.ray_replicas"}
    import_without("triton", sorted(set(MODULES) - users - {"nanovllm.__main__"}))


def test_public_names_come_from_the_package() -> None:
    from nanovllm import LLM, SamplingParams

    assert LLM.__module__ == "nanovllm.llm" and SamplingParams.__module__ == "nanovllm.sampling_params"
    for name in nanovllm.__all__:
        assert getattr(nanovllm, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = nanovllm.Nothing


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name | ast.Attribute):
        called = value.func.id if isinstance(value.func, ast.Name) else value.func.attr
        return called in {"list", "dict", "set", "bytearray", "deque", "defaultdict", "OrderedDict", "Counter", "count"}
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def bindings(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                yield target.id, node.value


@pytest.mark.parametrize("name", sorted(MODULES))
def test_no_module_keeps_state(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text())
    for bound, value in bindings(tree):
        constant = bound.isupper() or bound == "__all__"
        assert constant or not is_mutable(value), f"{name}.{bound} is mutable state at module level"
    globals_used = [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
    assert not globals_used, f"{name} has a global statement"
