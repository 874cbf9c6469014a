"""Begins the emulation in every Python process of its environment: around the imports of torch, Triton's launches and
the project's extensions, which are those that were built against the emulated GPU."""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


class Imports(importlib.abc.MetaPathFinder):
    """Runs a function after the import of a module, and finds the project's extensions elsewhere."""

    def __init__(self, after: dict[str, Callable[[ModuleType], None]], extension: Path) -> None:
        self._after = after
        self._extension = extension

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        parts = name.split(".")
        if parts[0] == "nanovllm" and parts[-1].startswith("_"):
            found = list(self._extension.joinpath(*parts[:-1]).glob(f"{parts[-1]}.*.so"))
            return importlib.util.spec_from_file_location(name, found[0]) if found else None
        if name not in self._after:
            return None
        after = self._after.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and(module: ModuleType) -> None:
            execute(module)
            after(module)

        spec.loader.exec_module = execute_and  # type: ignore[method-assign]
        return spec


def begin(facts_file: str) -> None:
    if any(isinstance(finder, Imports) for finder in sys.meta_path):
        return  # Python reads the start files of an environment twice where two names lead to its packages
    facts = json.loads(Path(facts_file).read_text())
    libraries = Path(facts["libraries"])
    os.environ["EMULATED_GPU"] = str(libraries)
    os.environ["TRITON_LIBCUDA_PATH"] = str(libraries)
    os.environ.setdefault("TRITON_CACHE_DIR", facts["triton_cache"])

    def after_torch(torch: ModuleType) -> None:
        import emulated_gpu

        emulated_gpu.install_operators()

    def after_triton(module: ModuleType) -> None:
        import emulated_triton

        emulated_triton.install(module)

    sys.meta_path.insert(0, Before("torch", libraries))
    after = {"torch": after_torch, "triton.runtime.jit": after_triton}
    sys.meta_path.insert(0, Imports(after, Path(facts["extension"])))


class Before(importlib.abc.MetaPathFinder):
    """Loads the emulated libraries before torch, which then finds them by their names."""

    def __init__(self, name: str, libraries: Path) -> None:
        self._name = name
        self._libraries = libraries

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == self._name:
            import ctypes

            sys.meta_path.remove(self)
            for library in sorted(self._libraries.glob("lib*.so.*")):
                if library.suffix not in (".c", ".map"):
                    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
