"""Reports as text and as JSON, with the machine and versions that are needed to interpret them later."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch

import nanovllm
from benchmarks.timing import Rates, Spread

MIB = 1 << 20
FILE_ARGUMENTS = ("output_json", "output_dir", "trace", "llama_cpp")
ROOT = Path(__file__).resolve().parent.parent


def python_path() -> str:
    """PYTHONPATH of a process that imports this tree, and what this process finds by its own."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def machine_facts(device: str) -> dict[str, Any]:
    """Where and with what this was measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device,
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
        "cpu_kernels": _cpu_kernels() if device == "cpu" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nanovllm": nanovllm.__version__,
        "commit": commit(),
        **(gpu_facts() if device == "cuda" else {}),
    }


def gpu_facts() -> dict[str, Any]:
    """The GPU and the versions of its software; None for what is not reported."""
    from nanovllm.comm import _sgdma

    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpu_memory_bytes": memory,
        "driver": _output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "cuda": torch.version.cuda,
        "extension_cuda": _sgdma.cuda_version(),
        "triton": _version_of("triton"),
    }


def peak_device_bytes(device: str) -> int | None:
    """Peak of the device memory that torch allocated in this process; None on the CPU."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


def peak_rss_bytes() -> int:
    """Peak resident memory of this process, up to some pages. Defined here, so that it works without an engine."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None, "/proc/self/status has no VmHWM"
    return int(match.group(1)) * 1024


def _cpu_model() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match.group(1) if match else platform.machine()


def _cpu_kernels() -> str | None:
    """The instruction sets of nanovllm's kernels; None in an environment without them."""
    try:
        from nanovllm.ops.cpu_kernels import cpu_kernel_choice
    except ImportError:
        return None
    return str(cpu_kernel_choice())


def commit() -> str | None:
    """The commit from NANOVLLM_COMMIT, for a copy of the tree without git, or `commit_of` this tree."""
    return os.environ.get("NANOVLLM_COMMIT") or commit_of(ROOT)


def commit_of(tree: Path) -> str | None:
    """The commit of a git repository, marked if files were changed; None if it is no repository."""
    return _output_of(["git", "-C", str(tree), "describe", "--always", "--dirty", "--exclude=*"])


def _output_of(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- text


def print_row(label: str, value: str, note: str = "") -> None:
    print(f"{label:<30}{value:>16}   {note}".rstrip(), flush=True)


def print_facts(facts: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """The head of a report."""
    network = f"{model['name']}, {model['num_layers']} layers, {model['dtype']}"
    weights = "random weights" if model["load_format"] == "dummy" else "weights"
    print(f"{network}, {weights} of {mib(model['weight_bytes'])}")
    gpu = f"{facts['gpu']}, driver {facts['driver']}, CUDA {facts['cuda']}; " if "gpu" in facts else ""
    print(f"{facts['device']}: {gpu}{facts['cpu']}, {facts['threads']} threads; {facts['date']}")
    engine = f"nanovllm {facts['nanovllm']} ({facts['commit'] or 'no git commit'})"
    print(f"{engine}, torch {facts['torch']}, Python {facts['python']}")
    if facts.get("cpu_kernels") is not None:
        print(f"CPU kernels: {facts['cpu_kernels']}")
    print(flush=True)


def print_other_load(share: float) -> None:
    print_row("other processes", f"{share:.0%}", "of all processors while this was measured")


def print_rates(rates: Rates) -> None:
    """Both speeds and both latencies, with their spread."""
    print_spread("prefill", rates.prefill_tok_s, "{:,.1f}", "tok/s")
    print_spread("decode", rates.decode_tok_s, "{:,.1f}", "tok/s")
    print_spread("TTFT", rates.ttft_s, "{:,.3f}", "s")
    print_spread("TPOT", scaled(rates.tpot_s, 1e3), "{:,.1f}", "ms")


def print_spread(label: str, spread: Spread | None, form: str, unit: str = "") -> None:
    """The median, and the extremes if they differ from it; a dash if there is no such figure."""
    if spread is None:
        print_row(label, "-")
        return
    extremes = "" if spread.low == spread.high else f"{form.format(spread.low)} to {form.format(spread.high)}"
    print_row(label, f"{form.format(spread.median)} {unit}".rstrip(), extremes)


def scaled(spread: Spread | None, factor: float) -> Spread | None:
    return spread and Spread(spread.median * factor, spread.low * factor, spread.high * factor)


def mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:,.1f} MiB"


# ---- JSON


def plain(args: argparse.Namespace, facts: Mapping[str, Any], **parts: Any) -> dict[str, Any]:
    """One JSON object of arguments, machine and parts."""
    # Output paths are not part of the measurement.
    arguments = {name: value for name, value in vars(args).items() if name not in FILE_ARGUMENTS}
    report: dict[str, Any] = json.loads(json.dumps({"arguments": arguments, "machine": facts, **parts}, default=_plain))
    return report


def write_json(path: Path | None, args: argparse.Namespace, facts: Mapping[str, Any], **parts: Any) -> None:
    """Write `plain` of the report, if a path was given."""
    if path is not None:
        path.write_text(json.dumps(plain(args, facts, **parts), indent=2) + "\n")


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)
