"""Stubs for NVIDIA's libraries: every function that torch's libraries want of them, and that the emulation lacks.

A function of cuBLAS and its like reports success without doing anything: ATen's operators call it for their checks, and
their results come from the CPU. A function of CUDA's runtime that the emulation lacks fails, and says so.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

# By the beginning of a library's name: that of its functions.
FUNCTIONS = {
    "libcublasLt.": "cublasLt",
    "libcublas.": "cublas(?!Lt)",
    "libcudnn.": "cudnn",
    "libcufft.": "cufft",
    "libcufile.": "cuFile",
    "libcupti.": "cupti",
    "libcurand.": "curand",
    "libcusolver.": "cusolver",
    "libcusparse.": "cusparse(?!Lt)",
    "libcusparseLt.": "cusparseLt",
    "libnccl.": "p?nccl",
    "libnvrtc.": "nvrtc",
    "libnvshmem_host.": "nvshmem",
}
# What a function does instead of nothing; its arguments are a to j.
BODIES = {
    "cublasGetVersion_v2": "*(int*)b = 130000; return 0;",
    "cublasLtGetVersion": "return 130000;",
    "cublasLtMatmulAlgoGetHeuristic": "*(int*)j = 1; return 0;",
    "cudnnGetVersion": "return 91900;",
    "cudnnGetCudartVersion": "return 13000;",
    "cudnnGetProperty": "*(int*)b = (long)a == 0 ? 9 : (long)a == 1 ? 99 : 0; return 0;",  # newer than any torch asks
    "cuptiSubscribe": "return 15;",  # there is no profiler
    "cuptiGetResultString": '*(const char**)b = "the emulated GPU has no profiler"; return 0;',
    "ncclGetVersion": "*(int*)a = 22900; return 0;",
    "nvshmemx_init_status": "return 0;",
}
POINTERS = ", ".join(f"void* {name}" for name in "abcdefghij")


def write_stubs(torch_libraries: Path, target: Path) -> None:
    """Compile a library of stubs for each of NVIDIA's that torch is linked with, except CUDA's runtime and driver."""
    wanted = undefined(torch_libraries.glob("*.so*"))
    for library in sorted(linked(torch_libraries)):
        pattern = next((each for start, each in FUNCTIONS.items() if library.startswith(start)), None)
        if pattern is None:
            continue
        names = sorted(name for name in wanted if re.match(pattern, name))
        versions = {wanted[name] for name in names} - {""}
        source = target / f"{library}.c"
        source.write_text("#include <stdlib.h>\n" + "".join(map(stub, names)))
        command = ["gcc", "-w", "-O1", "-shared", "-fPIC", str(source), "-o", str(target / library)]
        if versions:
            script = target / f"{library}.map"
            script.write_text("".join(f"{version} {{ global: *; }};\n" for version in versions))
            command.append(f"-Wl,--version-script={script}")
        subprocess.run([*command, f"-Wl,-soname,{library}"], check=True)


def stub(name: str) -> str:
    created = "*(void**)a = malloc(64); return 0;" if re.search(r"Create(_v2)?$", name) else "return 0;"
    if name.endswith("GetErrorString") or name.endswith("GetStatusString"):
        created = 'return (long)"an error of the emulated GPU";'
    return f"long {name}({POINTERS}) {{ {BODIES.get(name, created)} }}\n"


def missing_functions(torch_libraries: Path, triton: Path, objects: Sequence[Path]) -> str:
    """C source of CUDA's functions that torch or Triton wants and that the emulation's objects do not define."""
    output = subprocess.run(["nm", "--defined-only", *objects], capture_output=True, text=True, check=True).stdout
    defined = {line.split()[-1] for line in output.splitlines() if len(line.split()) == 3}
    names = [name for name, version in undefined(torch_libraries.glob("*.so*")).items() if "cudart" in version]
    names += re.findall(r"\bcu[A-Z]\w+(?=\()", (triton / "backends/nvidia/driver.c").read_text())
    body = "#include <stdio.h>\n"
    for name in sorted(set(names) - defined):
        said = f'fprintf(stderr, "[emulated GPU] {name} is not emulated\\n")'
        body += f"int {name}(void) {{ {said}; return 801; }}\n"  # cudaErrorNotSupported
    return body


def undefined(libraries: object) -> dict[str, str]:
    """The symbols that libraries want of others, with their versions."""
    versions: dict[str, str] = {}
    for library in libraries:  # type: ignore[attr-defined]
        command = ["nm", "-D", "--undefined-only", "--with-symbol-versions", library]
        for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
            name, _, version = line.split()[-1].partition("@")
            versions[name] = version.lstrip("@") or versions.get(name, "")
    return versions


def linked(torch_libraries: Path) -> set[str]:
    names: set[str] = set()
    for library in torch_libraries.glob("*.so*"):
        text = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        names.update(re.findall(r"\(NEEDED\).*\[(.+)\]", text))
    return names
