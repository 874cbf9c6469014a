"""Facts of the machine: memory, limits, driver, packages. Measures nothing.

    python -m benchmarks.gpu_facts [--output-json FILE]

Facts that need no torch are written before torch is imported, since the import may take long on a fresh machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Imported by the parts of the GPU check; the last ones are optional.
NEEDED = (
    *("torch", "triton", "setuptools", "pytest", "hypothesis", "transformers", "safetensors"),
    *("tokenizers", "xxhash", "numpy"),
)
USEFUL = ("xdist", "flash_attn", "flash_attn_interface")
DISTRIBUTIONS = {"xdist": "pytest-xdist"}
MEMINFO = ("MemTotal", "MemFree", "MemAvailable", "SwapTotal", "HugePages_Total", "Mlocked")
GPU_QUERY = (
    "name,driver_version,memory.total,memory.used,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,power.limit"
)


def memory_facts() -> dict[str, Any]:
    """Memory in bytes by /proc/meminfo and the control group, and the limit of locked memory."""
    text = Path("/proc/meminfo").read_text()
    facts: dict[str, Any] = {
        name: int(match.group(1)) * (1024 if match.group(2) else 1)
        for name in MEMINFO
        if (match := re.search(rf"^{name}:\s+(\d+)( kB)?", text, re.MULTILINE))
    }
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).is_file():
            facts["cgroup_limit"] = Path(path).read_text().strip()
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    facts["memlock_limit"] = "unlimited" if limit == resource.RLIM_INFINITY else limit
    facts["disk_free"] = shutil.disk_usage(".").free
    return facts


def host_facts() -> dict[str, Any]:
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "python": sys.version,
        "executable": sys.executable,
        "kernel": platform.release(),
        "cpu": match.group(1) if match else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "commit": os.environ.get("NANOVLLM_COMMIT"),
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(("CUDA", "NVIDIA", "OMP"))
        },
    }


def tool_facts() -> dict[str, Any]:
    """Versions reported by the driver and the compilers; None for missing ones."""
    return {
        "nvidia-smi": _first_line(["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader"]),
        "nvcc": _last_line(["nvcc", "--version"]),
        "g++": _first_line(["g++", "--version"]),
    }


def package_facts() -> dict[str, str | None]:
    """Versions by name; None for packages that cannot be imported."""
    versions: dict[str, str | None] = {}
    for name in (*NEEDED, *USEFUL):
        versions[name] = None
        if importlib.util.find_spec(name) is not None:
            try:
                versions[name] = importlib.metadata.version(DISTRIBUTIONS.get(name, name.replace("_", "-")))
            except importlib.metadata.PackageNotFoundError:
                versions[name] = "of unknown version"
    return versions


def torch_facts() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": None}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "gpu_memory": total,
            "gpu_memory_free": free,
            "cudnn": torch.backends.cudnn.version(),
        }
    return facts


def _first_line(command: list[str]) -> str | None:
    return next(iter(_lines(command)), None)


def _last_line(command: list[str]) -> str | None:
    lines = _lines(command)
    return lines[-1] if lines else None


def _lines(command: list[str]) -> list[str]:
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 where a package that the GPU check needs is missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_facts", description="What machine this is.")
    parser.add_argument("--output-json", type=Path, help="file to write everything to")
    args = parser.parse_args(argv)
    facts: dict[str, Any] = {}
    groups = {"host": host_facts, "memory": memory_facts, "tools": tool_facts, "packages": package_facts}
    for name, group in {**groups, "torch": torch_facts}.items():
        facts[name] = group()
        print(f"{name}: {json.dumps(facts[name], indent=2)}", flush=True)
        if args.output_json is not None:
            args.output_json.write_text(json.dumps(facts, indent=2) + "\n")
    missing = [name for name in NEEDED if facts["packages"][name] is None]
    if missing:
        print(f"gpu_facts: missing packages: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
