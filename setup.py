"""Builds the C++ extensions. Everything else about the package stands in pyproject.toml.

NANOVLLM_CUDA=1 compiles the CUDA half (nvcc must be there), NANOVLLM_CUDA=0 leaves it out; unset, it is
compiled where both nvcc and a GPU are found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

CXX_FLAGS = ["-O3", "-g0", "-Wall", "-Wextra"]  # no -march=native: a wheel must run on other machines too
CUDART_LIBRARIES = ["-lcudart_static", "-lrt", "-ldl", "-lpthread"]
NVCC_ARCHS = ("80", "90")


def find_nvcc() -> Path | None:
    """The CUDA compiler of CUDA_HOME, else of PATH."""
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=f"{home}/bin") if home else None
    found = found or shutil.which("nvcc")
    return Path(found) if found else None


def choose_nvcc() -> Path | None:
    """The compiler to build the CUDA half with, or None for a build without CUDA."""
    wish = os.environ.get("NANOVLLM_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"NANOVLLM_CUDA must be 0 or 1, got {wish!r}.")
    gpu_seen = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    if wish == "0" or (wish == "" and not gpu_seen):
        return None
    nvcc = find_nvcc()
    if nvcc is None and wish == "1":
        raise SystemExit("NANOVLLM_CUDA=1 but there is no nvcc: put it on PATH or set CUDA_HOME.")
    return nvcc


def cuda_library_dir(nvcc: Path) -> str:
    """Where the toolkit of `nvcc` keeps libcudart_static.a."""
    text = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True).stderr
    tops = [line.split("TOP=", 1)[1].strip() for line in text.splitlines() if "TOP=" in line]
    homes = [Path(top) for top in tops] + [nvcc.resolve().parent.parent]
    dirs = [home / sub for home in homes for sub in ("lib64", "lib", "targets/x86_64-linux/lib")]
    for directory in dirs:
        if (directory / "libcudart_static.a").exists():
            return str(directory)
    raise SystemExit(f"No libcudart_static.a beside {nvcc}: install all of CUDA, or set NANOVLLM_CUDA=0.")


class BuildExt(build_ext):
    """build_ext that hands .cu sources to nvcc."""

    def run(self) -> None:
        # A changed NANOVLLM_CUDA leaves the time stamps as they are, so build_ext would see nothing to do.
        if "NANOVLLM_CUDA" in os.environ:
            self.force = True
        super().run()

    def build_extension(self, ext: Pybind11Extension) -> None:
        cuda_sources = [source for source in ext.sources if source.endswith(".cu")]
        nvcc = choose_nvcc() if cuda_sources else None
        ext.sources = [source for source in ext.sources if not source.endswith(".cu")]
        if nvcc is not None:
            ext.define_macros.append(("NANOVLLM_WITH_CUDA", "1"))
            ext.extra_objects += [self.compile_cuda(nvcc, source) for source in cuda_sources]
            # The static runtime lets the module be imported on a machine without any CUDA library.
            ext.extra_link_args += [f"-L{cuda_library_dir(nvcc)}", *CUDART_LIBRARIES]
        if cuda_sources:
            half = f"with CUDA ({nvcc})" if nvcc else "without CUDA (NANOVLLM_CUDA=1 forces it)"
            print(f"building {ext.name} {half}", flush=True)
        super().build_extension(ext)

    def compile_cuda(self, nvcc: Path, source: str) -> str:
        """Compile one .cu file; returns the path of the object file."""
        target = Path(self.build_temp) / f"{Path(source).stem}.cu.o"
        target.parent.mkdir(parents=True, exist_ok=True)
        archs = [f"-gencode=arch=compute_{arch},code=[sm_{arch},compute_{arch}]" for arch in NVCC_ARCHS]
        flags = ["-O3", "-std=c++17", "-Xcompiler=-fPIC", *archs]
        subprocess.run([nvcc, "-c", source, "-o", target, *flags], check=True)
        return str(target)


def extension(name: str, stem: str, *flags: str) -> list[Pybind11Extension]:
    """The extension module of csrc/<stem>*.cpp and .cu, none if csrc/<stem>.cpp is missing."""
    if not Path(f"csrc/{stem}.cpp").exists():
        return []
    module = Pybind11Extension(
        name,
        sorted(glob(f"csrc/{stem}*.c*")),
        depends=sorted(glob("csrc/*.h")),
        cxx_std=17,
        extra_compile_args=[*CXX_FLAGS, *flags],
        extra_link_args=[*flags],
    )
    return [module]


ParallelCompile(default=0).install()  # the files of one extension at the same time, on all cores
setup(
    ext_modules=[
        *extension("nanovllm.comm._sgdma", "sgdma"),
        *extension("nanovllm.ops._cpu_attention", "cpu_attention", "-fopenmp"),
        *extension("nanovllm.ops._cpu_linear", "cpu_linear", "-fopenmp"),
    ],
    cmdclass={"build_ext": BuildExt},
)
