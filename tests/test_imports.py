"""The structure of the package: which module imports which, and no module-level state."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

import nanovllm

PACKAGE = Path(nanovllm.__file__).parent
TORCH_FREE = (
    "nanovllm",
    "nanovllm.apps.batch",
    "nanovllm.apps.batch.results",
    "nanovllm.apps.batch.replica",
    "nanovllm.apps.cli.batch",
    "nanovllm.apps.cli.chat",
    "nanovllm.apps.cli.generate",
    "nanovllm.apps.cli.main",
    "nanovllm.apps.cli.plan",
    "nanovllm.features.planner.units",
    "nanovllm.config",
    "nanovllm.data.json_fields",
    "nanovllm.data.batch",
    "nanovllm.memory.layout",
    "nanovllm.data.memory_checks",
    "nanovllm.errors",
    "nanovllm.features.cpu_attention.shares",
    "nanovllm.memory.layerwise",
    "nanovllm.features.kv_disk.stored_blocks",
    "nanovllm.lora_request",
    "nanovllm.features.lora.slots",
    "nanovllm.features.planner.step_work",
    "nanovllm.features.planner.plan",
    "nanovllm.features.recomputed_tokens",
    "nanovllm.features.recurrent.states",
    "nanovllm.features.speculation.hook",
    "nanovllm.features.structured_outputs",
    "nanovllm.features.structured_outputs.step_masks",
    "nanovllm.kvcache.hybrid_manager",
    "nanovllm.layers.row_limits",
    "nanovllm.memory.layout",
    "nanovllm.memory.budget",
    "nanovllm.memory.fitting",
    "nanovllm.memory.sizing",
    "nanovllm.outputs",
    "nanovllm.sampling_params",
    *("nanovllm.text.chat_template", "nanovllm.text.detokenizer"),
    "nanovllm.text.tokenizer",
)
NEEDS_TORCH = {
    "nanovllm.engine.model_runner",
    "nanovllm.engine.row_sampling",
    "nanovllm.memory.profiling",
}

# From the bottom up. A unit is a file or a package directly under nanovllm; "" is the package's own __init__.
ROWS: tuple[set[str], ...] = (
    {"errors"},
    {"vllm_names"},
    {"lora_request", "outputs", "rules"},
    {"config_rules", "sampling_rules", "speculative_config"},
    {"sampling_params"},
    {"data"},
    {"comm", "ops"},
    {"device", "layers"},
    {"formats"},
    {"config", "text"},
    {"models"},
    {"memory"},
    {"kvcache"},
    {"engine"},
    {"features"},
    {"build", "client"},
    {"llm"},
    {""},
    {"apps"},
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


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


def own_imports(name: str) -> set[str]:
    """The modules of this package that a module imports, inside functions too."""
    found = set()
    for imported in imported_names(parsed(name)):
        while imported and imported not in MODULES and imported not in EXTENSIONS:  # a name within a module
            imported = imported.rpartition(".")[0]
        if imported:
            found.add(imported)
    return found - {name}


@cache
def all_imports() -> dict[str, set[str]]:
    """Of each module; not of the root, which loads its names on first use."""
    return {name: own_imports(name) for name in MODULES if name != "nanovllm"}


def unit(name: str) -> str:
    return name.removeprefix("nanovllm").removeprefix(".").partition(".")[0]


def row(name: str) -> int:
    for index, units in enumerate(ROWS):
        if unit(name) in units:
            return index
    raise AssertionError(f"{name} is in none of ROWS: add it")


def test_imports_go_down_only() -> None:
    upwards = [
        f"{name} imports {imported}, which is not below it"
        for name, imports in all_imports().items()
        for imported in imports
        if unit(imported) != unit(name) and row(imported) >= row(name)
    ]
    assert upwards == []


# What applications may import of the package, besides the names of its root: public modules, which users import too.
PUBLIC = {
    *("nanovllm", "nanovllm.config", "nanovllm.errors", "nanovllm.outputs", "nanovllm.rules"),
    *("nanovllm.sampling_params", "nanovllm.vllm_names", "nanovllm.text.prompts", "nanovllm.text.tokenizer"),
    *("nanovllm.text.chat_template", "nanovllm.text.detokenizer"),
    *("nanovllm.data.progress", "nanovllm.features.progress_bar", "nanovllm.features.planner"),
    "nanovllm.features.kv_disk",
}


def test_applications_import_public_names_alone() -> None:
    applications = {name: imports for name, imports in all_imports().items() if unit(name) == "apps"}
    assert len(applications) >= 20
    for name, imports in applications.items():
        below = {imported for imported in imports if unit(imported) != "apps"}
        assert below <= PUBLIC, f"{name} imports {sorted(below - PUBLIC)}"
        if not name.startswith("nanovllm.apps.cli"):
            others = [imported for imported in imports if imported.startswith("nanovllm.apps.cli")]
            assert not others, f"{name} is another application than the command line"


def test_no_import_cycles() -> None:
    try:
        TopologicalSorter(all_imports()).prepare()
    except CycleError as error:
        raise AssertionError(f"modules import each other: {' -> '.join(error.args[1])}") from error


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
    users = kernels | {"nanovllm.ops.triton_attention", "nanovllm.features.lora.grouped_adapters"} & set(MODULES)
    users |= set() if find_spec("ray") else {"nanovllm.apps.batch.ray_data"}
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


def test_no_module_keeps_state() -> None:
    for name in MODULES:
        tree = parsed(name)
        for bound, value in bindings(tree):
            constant = bound.isupper() or bound == "__all__"
            assert constant or not is_mutable(value), f"{name}.{bound} is mutable state at module level"
        globals_used = [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
        assert not globals_used, f"{name} has a global statement"
