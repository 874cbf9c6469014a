"""Makes the environment in which torch's CUDA build runs over the emulated GPU.

    python tests/cuda_emulation/environment.py DIRECTORY TORCH_VERSION

A virtual environment with torch's CUDA wheel, the Triton that belongs to it and what the tests need; none of NVIDIA's
libraries, which are larger than torch and replaced here. What is there already is kept. Downloads are kept by pip.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from stubs import missing_functions, write_stubs  # noqa: E402

# What torch's wheel asks for and the emulation replaces. Refused, so that no other package brings it in either.
REPLACED = re.compile(r"(nvidia-|cuda-)", re.IGNORECASE)
# Triton's interpreter does not work with newer numpy.
PACKAGES = ["numpy<2.4", "pytest", "hypothesis", "gguf>=0.10", "coverage"]
RUNTIME = ("memory", "streams", "runtime_api", "driver_api")
CXX = ["g++", "-std=c++17", "-O2", "-g1", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter"]


class Environment:
    """Its parts, each made by a method that does nothing where the part exists."""

    def __init__(self, directory: Path, torch_version: str) -> None:
        self.directory = directory.resolve()
        self.torch_version = torch_version
        self.libraries = self.directory / "lib"
        self.python = self.directory / "venv/bin/python"
        self.site = self.directory / f"venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        self.headers = self.directory / "headers"
        self.libraries.mkdir(parents=True, exist_ok=True)

    def make(self) -> None:
        self.install()
        self.build_libraries()
        self.build_extension()
        self.start_with_python()

    # ---- packages

    def install(self) -> None:
        done = self.directory / "installed"
        if done.exists():
            return
        venv.create(self.directory / "venv", with_pip=True)
        # Three equals signs: not the CPU build of this version, whose name has a local part.
        self.pip("--no-deps", f"torch==={self.torch_version}")
        triton = self.without_replaced_requirements()
        self.pip("--no-deps", triton)
        cuda = re.search(r"cuda\b.*'(\d+\.\d+)'", (self.site / "torch/version.py").read_text())
        assert cuda, f"torch {self.torch_version} is not a CUDA build"
        headers = [f"nvidia-cuda-{part}=={cuda[1]}.*" for part in ("runtime", "crt")]
        self.pip("--no-deps", "--target", str(self.headers), *headers)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        self.pip(*project["dependencies"], *extras["build"], *extras["structured"], *PACKAGES)
        done.touch()

    def without_replaced_requirements(self) -> str:
        """Takes what the emulation replaces out of what torch's wheel asks for. Returns its requirement of Triton."""
        (metadata,) = self.site.glob("torch-*.dist-info/METADATA")
        lines = metadata.read_text().splitlines(keepends=True)
        wants = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
        replaced = [want for want in wants if REPLACED.match(want)]
        metadata.write_text("".join(line for line in lines if line.removeprefix("Requires-Dist: ") not in replaced))
        names = sorted({re.split(r"[\[=<>; ]", want)[0] for want in replaced})
        (self.directory / "refused.txt").write_text("".join(f"{name}<0\n" for name in names))
        return next(want.split(";")[0].strip() for want in wants if want.startswith("triton"))

    def pip(self, *arguments: str) -> None:
        refused = self.directory / "refused.txt"
        constraint = ["--constraint", str(refused)] if refused.exists() and "--target" not in arguments else []
        run([self.python, "-m", "pip", "install", "--quiet", *constraint, *arguments])

    # ---- the emulated GPU

    @property
    def include(self) -> list[str]:
        """Of CUDA's headers: `cuda.h` comes with Triton."""
        (runtime,) = self.headers.glob("nvidia/cu*/include")
        return [f"-I{runtime}", f"-I{self.site / 'triton/backends/nvidia/include'}"]

    def build_libraries(self) -> None:
        """CUDA's runtime and driver, stubs for NVIDIA's other libraries, and ATen's operators."""
        (runtime,) = {name for name in needed(self.site / "torch/lib/libtorch_cuda.so") if "libcudart" in name}
        sources = [HERE / f"runtime/{name}.cpp" for name in RUNTIME]
        target = self.libraries / runtime
        if not_newer(target, [*sources, *HERE.glob("runtime/*.h"), HERE / "stubs.py"]):
            objects = []
            for source in sources:
                objects.append(self.libraries / f"{source.stem}.o")
                run([*CXX, *self.include, "-c", source, "-o", objects[-1]])
            write_stubs(self.site / "torch/lib", self.libraries)
            rest = self.libraries / "missing.c"
            rest.write_text(missing_functions(self.site / "torch/lib", self.site / "triton", objects))
            exported = self.libraries / "cudart.map"
            exported.write_text(runtime + " { global: cuda*; __cuda*; cu*; emulation_*; local: *; };\n")
            link = [f"-Wl,-soname,{runtime}", f"-Wl,--version-script={exported}", "-ldl", "-lpthread"]
            run(["gcc", "-O1", "-fPIC", "-c", rest, "-o", self.libraries / "missing.o"])
            run(["g++", "-shared", *objects, self.libraries / "missing.o", "-o", target, *link])
            driver = ["-Wl,-soname,libcuda.so.1", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", "-x", "none", target]
            run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", self.libraries / "libcuda.so.1", *driver])
            link_to(self.libraries / "libcuda.so", "libcuda.so.1")
        self.build_operators(target)

    def build_operators(self, runtime: Path) -> None:
        target = self.libraries / "libemulated_aten.so"
        sources = sorted(HERE.glob("runtime/aten*.cpp"))
        if not not_newer(target, [*sources, *HERE.glob("runtime/aten*.h")]):
            return
        torch = self.site / "torch"
        include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}", *self.include]
        link = [f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-lc10_cuda", f"-L{self.libraries}"]
        unresolved = "-Wl,--unresolved-symbols=ignore-in-shared-libs"
        run([*CXX, "-w", *include, "-shared", *sources, "-o", target, *link, f"-l:{runtime.name}", unresolved])

    # ---- the project's extension

    def build_extension(self) -> None:
        """With a toolkit whose compiler is the host's: the .cu source has host code only. pybind11 comes with `build`
        of pyproject.toml; an environment that was made without it builds with torch's copy.
        """
        (runtime,) = self.libraries.glob("libcudart.so.*")
        toolkit = self.directory / "toolkit"
        (toolkit / "bin").mkdir(parents=True, exist_ok=True)
        (toolkit / "lib").mkdir(exist_ok=True)
        nvcc = toolkit / "bin/nvcc"
        nvcc.write_text((HERE / "nvcc.sh").read_text().replace("@INCLUDE@", self.include[0]))
        nvcc.chmod(0o755)
        # A linker script in place of the static runtime.
        (toolkit / "lib/libcudart_static.a").write_text(f"INPUT({runtime})\n")
        built = self.directory / "extension"
        sources = [ROOT / "setup.py", *(ROOT / "csrc").iterdir()]
        if not_newer(built / "done", sources):
            shutil.rmtree(built, ignore_errors=True)
            variables = os.environ | {"CUDA_HOME": str(toolkit), "NANOVLLM_CUDA": "1"}
            where = ["--build-lib", str(built), "--build-temp", str(self.directory / "objects")]
            run([self.python, "setup.py", "--quiet", "build_ext", *where], cwd=ROOT, env=variables)
            (built / "done").touch()

    def start_with_python(self) -> None:
        """Every Python process of the environment begins with the emulation."""
        facts = {"libraries": str(self.libraries), "extension": str(self.directory / "extension")}
        facts["triton_cache"] = str(self.directory / "triton-cache")
        (self.directory / "emulation.json").write_text(json.dumps(facts))
        start = f"import sys; sys.path.append({str(HERE / 'inside')!r}); import emulated_gpu_start; "
        start += f"emulated_gpu_start.begin({str(self.directory / 'emulation.json')!r})\n"
        (self.site / "emulated_gpu.pth").write_text(start)


def needed(library: Path) -> list[str]:
    """The names of the libraries that a library is linked with."""
    text = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", text)


def not_newer(target: Path, sources: list[Path]) -> bool:
    return not target.exists() or target.stat().st_mtime <= max(source.stat().st_mtime for source in sources)


def link_to(link: Path, target: str) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def run(command: list[object], **options: object) -> None:
    subprocess.run([str(part) for part in command], check=True, **options)  # type: ignore[call-overload]


if __name__ == "__main__":
    Environment(Path(sys.argv[1]), sys.argv[2]).make()
