"""Builds the C++ extensions. pyproject.toml has the package's metadata.

NANOVLLM_CUDA=1 compiles the CUDA sources and fails without a working nvcc; NANOVLLM_CUDA=0 leaves them out. Without the
variable they are compiled if a working nvcc is found. The build prints the choice, and
`nanovllm.comm._sgdma.cuda_version()` tells it later.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# No -march=native: a wheel also runs on other machines.
CXX_FLAGS = ["-std=c++17", "-fvisibility=hidden", "-O2", "-g0", "-Wall", "-Wextra"]
# Without fused multiply-add all instruction sets give the same bits. The other two flags allow vectorized loops.
PLAIN_FLOAT = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# What is added by file. The source unrolls the loops over vectors, so -O2 is enough for them and nothing is left to
# vectorize. The compiler vectorizes only loops over rows; the elements after a row's last whole vector go one by one,
# since most rows have none. The gated delta rule takes half as long at -O3, which keeps a tile's sums in registers. The
# bindings, and the portable kernels, which few machines run, take the lowest level.
FLAGS_OF_FILES = (
    (re.compile(r"(_kernels|_bindings|cpu_(linear|packed)\w*)\.cpp$"), PLAIN_FLOAT),
    (re.compile(r"cpu_rows_kernels\.cpp$"), ["-ftree-vectorize", "-fvect-cost-model=dynamic"]),
    (re.compile(r"cpu_delta_kernels\.cpp$"), ["-O3"]),
    (re.compile(r"cpu_(rows|delta)_kernels\.cpp$"), ["--param=vect-epilogues-nomask=0"]),
    (re.compile(r"_avx\w+\.cpp$"), ["-fno-tree-vectorize"]),
    (re.compile(r"(sgdma|cpu_kernels|_bindings|_portable)\.cpp$"), ["-O1"]),  # of two levels the last counts
)
# Those that take longest come first, so that no core waits for another one's last file.
CPU_KERNELS = ("cpu_attention", "cpu_rows", "cpu_delta", "cpu_layer", "cpu_products", "cpu_kernels", "cpu_packed",
               "cpu_linear", "cpu_threads")  # fmt: skip
CUDART_LIBRARIES = ["-lcudart_static", "-lrt", "-ldl", "-lpthread"]


def pybind11_include() -> str:
    """The folder of pybind11's headers: of the package, else torch's copy, for a machine without network."""
    if importlib.util.find_spec("pybind11") is not None:
        import pybind11

        return pybind11.get_include()
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise SystemExit("The build needs pybind11: pip install pybind11.")
    return str(Path(torch.origin).parent / "include")


def find_nvcc() -> Path | None:
    """The CUDA compiler of CUDA_HOME, else of PATH, else where CUDA installs itself."""
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=f"{home}/bin") if home else None
    nvcc = nvcc or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return Path(nvcc) if nvcc else None


def cuda_wish() -> str:
    """The value of NANOVLLM_CUDA: "1", "0", or "" if the build chooses."""
    wish = os.environ.get("NANOVLLM_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"NANOVLLM_CUDA must be 0 or 1, got {wish!r}.")
    return wish


def cuda_library_dir(nvcc: Path) -> str:
    """The directory of libcudart_static.a in the toolkit of `nvcc`."""
    text = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True).stderr
    tops = [line.split("TOP=", 1)[1].strip() for line in text.splitlines() if "TOP=" in line]
    homes = [Path(top) for top in tops] + [nvcc.resolve().parent.parent]
    dirs = [Path(folder) for folder in re.findall(r'"-L([^"]+)"', text)]
    dirs += [home / sub for home in homes for sub in ("lib64", "lib", "targets/x86_64-linux/lib")]
    for directory in dirs:
        if (directory / "libcudart_static.a").exists():
            return str(directory)
    raise FileNotFoundError(f"the toolkit of {nvcc} has no libcudart_static.a")


class BuildExt(build_ext):
    """A build_ext that compiles the files of all extensions side by side, with their own flags, and .cu with nvcc."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or True  # one extension's last file leaves no core idle

    def run(self) -> None:
        # build_ext compares time stamps, which do not show that NANOVLLM_CUDA has changed.
        if "NANOVLLM_CUDA" in os.environ:
            self.force = True
        super().run()

    def build_extensions(self) -> None:
        compile_files = self.compiler.compile
        pool = ThreadPoolExecutor(os.cpu_count())

        def compile_file(source: str, options: dict[str, Any]) -> str:
            (target,) = self.compiler.object_filenames([source], output_dir=options["output_dir"])
            if self.force or is_stale(target, source):
                own = [flag for pattern, more in FLAGS_OF_FILES if pattern.search(source) for flag in more]
                compile_files([source], **{**options, "extra_postargs": [*options["extra_postargs"], *own]})
            return target

        def compile_side_by_side(sources: list[str], **options: Any) -> list[str]:
            return list(pool.map(lambda source: compile_file(source, options), sources))

        self.compiler.compile = compile_side_by_side
        with pool:
            super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        cuda_sources = [source for source in ext.sources if source.endswith(".cu")]
        ext.depends += cuda_sources
        ext.sources = [source for source in ext.sources if not source.endswith(".cu")]
        if cuda_sources:
            print(f"building {ext.name} {self.add_cuda_half(ext, cuda_sources)}", flush=True)
        super().build_extension(ext)

    def add_cuda_half(self, ext: Extension, sources: list[str]) -> str:
        """Compile the .cu sources into `ext` if possible. Returns the outcome as a phrase for the build log."""
        wish = cuda_wish()
        nvcc = find_nvcc()
        if wish == "0":
            return "without CUDA (NANOVLLM_CUDA=0)"
        if nvcc is None:
            if wish == "1":
                raise SystemExit("NANOVLLM_CUDA=1 but there is no nvcc: put it on PATH or set CUDA_HOME.")
            return "without CUDA (there is no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda)"
        try:
            objects = [self.compile_cuda(nvcc, source) for source in sources]
            libraries = cuda_library_dir(nvcc)
        except (OSError, subprocess.CalledProcessError) as error:
            if wish == "1":
                raise SystemExit(f"NANOVLLM_CUDA=1 but {nvcc} does not work: {error}.") from error
            return f"without CUDA ({nvcc} does not work: {error})"
        ext.define_macros.append(("NANOVLLM_WITH_CUDA", "1"))
        ext.extra_objects += objects
        # The static runtime lets the module be imported on a machine without any CUDA library.
        ext.extra_link_args += [f"-L{libraries}", *CUDART_LIBRARIES]
        return f"with CUDA ({nvcc})"

    def compile_cuda(self, nvcc: Path, source: str) -> str:
        """Compile one .cu file, which has host code only. Returns the path of the object file."""
        target = Path(self.build_temp) / f"{Path(source).stem}.cu.o"
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([nvcc, "-c", source, "-o", target, "-O3", "-std=c++17", "-Xcompiler=-fPIC"], check=True)
        return str(target)


def extension(name: str, stems: Sequence[str], *flags: str) -> Extension:
    """The extension module of csrc/<stem>*.cpp and .cu."""
    return Extension(
        name,
        [path for stem in stems for path in sorted(glob(f"csrc/{stem}*.c*"))],
        include_dirs=[pybind11_include()],
        depends=sorted(glob("csrc/*.h")),
        language="c++",
        extra_compile_args=[*CXX_FLAGS, *flags],
        extra_link_args=[*flags],
    )


def is_stale(obj: str, source: str) -> bool:
    """Whether an object is older than its source or than anything that sources include."""
    if not Path(obj).exists():
        return True
    made = Path(obj).stat().st_mtime
    return any(Path(path).stat().st_mtime > made for path in (source, __file__, *glob("csrc/*.h")))


setup(
    ext_modules=[
        extension("nanovllm.comm._sgdma", ["sgdma"]),
        extension("nanovllm.ops._cpu_kernels", CPU_KERNELS, "-pthread"),
    ],
    cmdclass={"build_ext": BuildExt},
)
