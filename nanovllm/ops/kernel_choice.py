"""The choice of the instruction set for each kind of work of the CPU kernels, by measurement, once per machine.

The newest instruction set is not always the fastest one: on some processors bf16 instructions run at half the rate of
the fp32 units. The bits of a result depend on the instruction set, so one process uses one choice, for many rows and
for few. The environment variable NANOVLLM_CPU_KERNELS is "default" (the newest, nothing is measured), "measure"
(measure again, and keep that), or a list as `KernelChoice.setting` writes it. NANOVLLM_CPU_ISA names the newest to use
and also turns measurement off.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from nanovllm.errors import ConfigError, quoted
from nanovllm.ops import _cpu_kernels

logger = logging.getLogger(__name__)

VARIABLE = "NANOVLLM_CPU_KERNELS"
ISA_VARIABLE = "NANOVLLM_CPU_ISA"
NEWEST_FIRST = ("avx512bf16", "avx512", "avx2", "portable")
WORKS = (
    "linear.bfloat16",
    "linear.float16",
    "linear.float32",
    "attention.bfloat16",
    "attention.float16",
    "attention.float32",
    "attention.int8",
    "packed",
)
MARGIN = 1.08  # how many times faster another instruction set must be than the newest, so that noise changes nothing
REPEATS = 5
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The instruction set for each kind of work."""

    newest: str  # instruction set that may be used
    isa_of: Mapping[str, str]  # by work, one of WORKS
    how: str  # the choice was made, in words

    @property
    def setting(self) -> str:
        """The value of NANOVLLM_CPU_KERNELS that pins this choice."""
        return ",".join(f"{work}={self.isa_of[work]}" for work in WORKS)

    def __str__(self) -> str:
        others = [f"{isa} for {work}" for work, isa in self.isa_of.items() if isa != self.newest]
        return f"{', '.join([self.newest, *others])} ({self.how})"


@cache
def kernel_choice(available: tuple[str, ...]) -> KernelChoice:
    """The choice of this process. available: instruction sets, newest first.

    Raises ConfigError if NANOVLLM_CPU_KERNELS names an unknown work, or an instruction set that is not available.
    """
    with _LOCK:  # two threads would measure each other
        return find_choice(available)


def find_choice(available: Sequence[str]) -> KernelChoice:
    """What the environment says, else what is kept for this machine, else what is measured now."""
    newest = available[0]
    asked = os.environ.get(VARIABLE, "")
    usual = dict.fromkeys(WORKS, newest)
    if asked not in ("", "default", "measure"):
        return KernelChoice(newest, usual | _parsed(asked, available), f"as {VARIABLE} says")
    if os.environ.get(ISA_VARIABLE):
        return KernelChoice(newest, usual, f"as {ISA_VARIABLE} says")
    works = [work for work in WORKS if len(candidates(work, available)) > 1]
    if asked == "default" or not works:
        return KernelChoice(newest, usual, "the newest")
    machine = machine_key(available)
    file = choice_file(available)
    kept = None if asked == "measure" or file is None else read_choice(file, machine, available)
    if kept is None:
        measured = usual | {work: measure(work, *candidates(work, available)) for work in works}
        # Of two processes that measure at once, the later one follows the earlier one.
        kept = None if asked == "measure" or file is None else read_choice(file, machine, available, warn=False)
        if kept is None:
            kept = measured
            _keep(file, machine, measured)
    return KernelChoice(newest, usual | kept, "measured")


def candidates(work: str, available: Sequence[str]) -> tuple[str, ...]:
    """The newest instruction set and the next one with other kernels for this work, unless that one is "portable"."""
    newest, *others = available
    if newest == "avx512bf16" and work not in ("linear.bfloat16", "attention.bfloat16", "attention.int8"):
        others = [isa for isa in others if isa != "avx512"]  # which has the same kernels for everything else
    return (newest, *(isa for isa in others[:1] if isa != "portable"))


def agreed(settings: Iterable[str]) -> str:
    """A setting that every process with one of these settings supports: of each work the oldest instruction set."""
    choices = [dict(part.split("=") for part in setting.split(",")) for setting in settings]
    oldest = {work: max((choice[work] for choice in choices), key=NEWEST_FIRST.index) for work in WORKS}
    return ",".join(f"{work}={isa}" for work, isa in oldest.items())


def pin(setting: str) -> None:
    """Let this process and those that it starts use a setting, also if it has made its own choice before."""
    os.environ[VARIABLE] = setting
    kernel_choice.cache_clear()


def _parsed(text: str, available: Sequence[str]) -> dict[str, str]:
    isa_of = {}
    for part in text.split(","):
        work, _, isa = part.strip().partition("=")
        if work not in WORKS or isa not in available:
            raise ConfigError(
                f"{VARIABLE}={quoted(text)}: {quoted(part)} is not WORK=INSTRUCTION_SET; works: {', '.join(WORKS)};"
                f" instruction sets of this machine: {', '.join(available)}; or 'default' or 'measure'"
            )
        isa_of[work] = isa
    return isa_of


# ---- what is kept of a machine


def machine_key(available: Sequence[str]) -> str:
    """What a measurement holds for: the processor, its vector instructions, and the size of the compiled kernels."""
    try:
        with open("/proc/cpuinfo") as file:
            facts = file.read(8192)  # the first processor
    except OSError:
        facts = ""
    name, flags = (re.search(rf"^{field}\s*:\s*(.*)$", facts, re.MULTILINE) for field in ("model name", "flags"))
    vector = sorted(flag for flag in (flags[1].split() if flags else ()) if flag.startswith(("avx", "amx", "fma")))
    processor = name[1] if name else platform.machine()
    size = os.stat(str(_cpu_kernels.__file__)).st_size
    return f"{processor}; {' '.join(vector)}; {' '.join(available)}; kernels of {size} bytes"


def choice_file(available: Sequence[str]) -> Path | None:
    """The file for this machine in the user's cache; None if the user has no home directory."""
    try:
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    digest = hashlib.sha256(machine_key(available).encode()).hexdigest()[:12]
    return cache_dir / "nanovllm" / f"cpu-kernels-{digest}.json"


def read_choice(file: Path, machine: str, available: Sequence[str], *, warn: bool = True) -> dict[str, str] | None:
    """The choice in a file; None if there is no file, or it is damaged or another machine's."""
    try:
        stored = json.loads(file.read_text())
        isa_of = {work: stored["isa_of"][work] for work in WORKS}
        if stored["machine"] != machine or any(isa not in candidates(work, available) for work, isa in isa_of.items()):
            raise ValueError("it is another machine's")
        return isa_of
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if warn:
            logger.warning("the choice of CPU kernels in %s cannot be used, they are measured again: %s", file, error)
        return None


def _keep(file: Path | None, machine: str, isa_of: Mapping[str, str]) -> None:
    """Write a choice, whole or not at all. Where that is impossible, a warning says so."""
    if file is None:
        logger.warning("the choice of CPU kernels cannot be kept without a home directory: set XDG_CACHE_HOME")
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=file.name, dir=file.parent) as folder:
            written = Path(folder) / file.name
            written.write_text(json.dumps({"machine": machine, "isa_of": isa_of}, indent=2))
            written.replace(file)
    except OSError as error:
        logger.warning("the choice of CPU kernels cannot be kept, each process measures them: %s", error)


# ---- measurement


def measure(work: str, newest: str, other: str) -> str:
    """The faster of two instruction sets for a work, in some milliseconds on one thread."""
    shapes = _calls(work)
    for _ in range(2):  # a rare disturbance does not come twice
        speedups = [_speedup(partial(call, isa=newest), partial(call, isa=other)) for call in shapes]
        if faster(newest, other, speedups) == newest:
            return newest
    return other


def faster(newest: str, other: str, speedups: Sequence[Sequence[float]]) -> str:
    """`other` if it is faster by MARGIN, else `newest`.

    speedups: for many rows, and for few, the ratios of the newest's seconds to the other's in each round. Medians
    count, and many rows as much as few: their geometric mean.
    """
    medians = [statistics.median(ratios) for ratios in speedups]
    return other if math.prod(medians) ** (1 / len(medians)) >= MARGIN else newest


def _speedup(newest: Callable[[], object], other: Callable[[], object]) -> list[float]:
    """In each round, the seconds of one call over those of the other, in alternating order."""
    _seconds(newest), _seconds(other)  # the first calls allocate scratch memory
    ratios = []
    for index in range(REPEATS):
        calls = (other, newest) if index % 2 else (newest, other)
        seconds = {call: _seconds(call) for call in calls}
        ratios.append(seconds[newest] / seconds[other])
    return ratios


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _calls(work: str) -> tuple[Callable[..., object], Callable[..., object]]:
    """Functions of `isa` that do this work: with many rows, and with few. All numbers are zero: speed is the same."""
    kind, _, dtype = work.partition(".")
    if kind == "linear":
        return _linear(dtype, rows=96), _linear(dtype, rows=4)
    if kind == "packed":
        return _packed(rows=96), _packed(rows=1)
    return _attention(dtype, rows=64, keys=256), _attention(dtype, rows=1, keys=2048)


def _linear(dtype: str, rows: int, size: int = 512) -> Callable[..., object]:
    x, y = torch.zeros(2, rows, size, dtype=getattr(torch, dtype))
    weight = x.new_zeros(size, size)

    def call(isa: str) -> object:
        _cpu_kernels.linear(
            isa=isa, dtype=dtype, x=(x.data_ptr(), size), weight=weight.data_ptr(), bias=0, y=(y.data_ptr(), size),
            rows=rows, in_features=size, out_features=size, interleaved=True, threads=1,
        )  # fmt: skip
        return y

    return call


def _packed(rows: int, size: int = 512, group: int = 32) -> Callable[..., object]:
    x, y = torch.zeros(2, rows, size, dtype=torch.bfloat16)
    data = torch.zeros(size * size // 2, dtype=torch.uint8)
    scales = torch.zeros(size * size // group)
    weight = _cpu_kernels.PackedWeight(
        scheme="int4", data=data.data_ptr(), scales=scales.data_ptr(), scale_dtype="float32", zeros=0,
        outputs_per_scale=1, group_size=group, in_features=size, out_features=size,
    )  # fmt: skip

    def call(isa: str) -> object:
        _cpu_kernels.packed_linear(
            isa=isa, dtype="bfloat16", x=(x.data_ptr(), size), weight=weight, bias=0, y=(y.data_ptr(), size),
            rows=rows, threads=1,
        )  # fmt: skip
        return y, data, scales  # which must live as long as the function

    return call


def _attention(kv_dtype: str, rows: int, keys: int) -> Callable[..., object]:
    heads = 4
    kv_heads = 2
    head_dim = 128
    dtype = "bfloat16" if kv_dtype == "int8" else kv_dtype
    q = torch.zeros(rows, heads, head_dim, dtype=getattr(torch, dtype))
    stored = head_dim + 4 if kv_dtype == "int8" else head_dim  # a scale follows each row of 8-bit KV
    block = torch.zeros(2, kv_heads, keys, stored, dtype=getattr(torch, kv_dtype))
    out = torch.zeros(rows, heads, head_dim)
    lse = torch.zeros(heads, rows)
    blocks = torch.tensor([block.data_ptr()])
    table = torch.tensor([[0, rows, 0, 1, 0, keys, keys - rows]])

    def call(isa: str) -> object:
        _cpu_kernels.attend(
            isa=isa, dtype=dtype, kv_dtype=kv_dtype, q=q.data_ptr(), q_strides=(heads * head_dim, head_dim),
            out=out.data_ptr(), out_strides=(heads * head_dim, head_dim), lse=lse.data_ptr(), lse_strides=(1, rows),
            blocks=blocks.data_ptr(), block_count=1, sequences=table.data_ptr(), sequence_count=1, tokens=rows,
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=keys, window=0, scale=head_dim**-0.5,
            carry=False, threads=1,
        )  # fmt: skip
        return out, block  # which must live as long as the function

    return call
