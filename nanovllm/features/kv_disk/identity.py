"""What decides the bits of K and V besides the tokens: the model's files, how it is computed, an adapter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch
import xxhash

from nanovllm.config import EngineConfig
from nanovllm.data.batch import Adapter
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.features.kv_disk import files
from nanovllm.features.kv_disk.policy import UNIT
from nanovllm.features.lora.adapter_files import CONFIG, stamp_of
from nanovllm.features.lora.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from nanovllm.ops.attention import AttentionBackend
from nanovllm.ops.backends import is_chunk_invariant
from nanovllm.ops.cpu_kernels import cpu_kernel_choice

KEY_BYTES = 16
KEY_TILE = 128  # of the CPU's attention, counted from a block's start: kTileKeys of csrc/cpu_attention.h
GPU_MODULES = ("triton", "flash_attn", "flash_attn_interface")  # what `ops` imports on a GPU, where it is installed
READ_BYTES = 1 << 20
WEIGHTS = (".safetensors", ".gguf")
PACKAGE = Path(__file__).parents[2]
APPLICATIONS = "apps"  # in the package: all else is the engine
CODE = (".py", ".so", ".json")  # the last: tables of tuned kernels, whose tiles decide the order of sums


def digest(*parts: bytes) -> bytes:
    """Of the parts with their lengths, so that no others have the same. BLAKE2b: nobody can make tokens collide."""
    total = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.digest()


def model_files(model: str | Path) -> list[Path]:
    """The files that decide a model's numbers: its weights and its config."""
    path = Path(model)
    if path.is_file():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix in WEIGHTS or file.name == "config.json")


def code_files(package: Path = PACKAGE) -> list[Path]:
    """The engine's code, extensions and tables: what reads weights decides bits as kernels do."""
    files = (path for path in package.rglob("*") if path.suffix in CODE and path.is_file())
    return sorted(path for path in files if path.relative_to(package).parts[0] != APPLICATIONS)


def code_digest() -> bytes:
    """Of the engine's code."""
    return digest(*(part for path in code_files() for part in (path.name.encode(), path.read_bytes())))


def file_digest(path: Path) -> bytes:
    """Of the file's bytes. Raises OSError."""
    total = xxhash.xxh3_128()
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while number := file.readinto(buffer):
            total.update(buffer[:number])
    return total.digest()


class FileDigests:
    """Digests of large files, kept in the store's directory by path, size and times, so that a file is read once."""

    def __init__(self, root: Path) -> None:
        self._path = root / files.DIGESTS
        self._known: dict[str, str] = {}

    def load(self) -> None:
        """Read what is kept, and make the directory. Raises OSError if that fails."""
        self._path.parent.mkdir(0o700, parents=True, exist_ok=True)
        with suppress(FileNotFoundError, ValueError, AttributeError):
            known = json.loads(self._path.read_text())
            self._known = {str(key): bytes.fromhex(value).hex() for key, value in known.items()}

    def save(self) -> None:
        """Keep what was computed. If that fails it is computed again, which only costs time."""
        with suppress(OSError):
            files.replace(self._path, json.dumps(self._known).encode())

    def of(self, paths: Iterable[Path]) -> bytes:
        """One digest of all these files' names and bytes. Raises OSError."""
        parts = list[bytes]()
        for path in paths:
            stat = path.stat()
            times = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)
            key = f"{path.resolve()}:{':'.join(map(str, times))}"
            if key not in self._known:
                self._known[key] = file_digest(path).hex()
            parts += (path.name.encode(), bytes.fromhex(self._known[key]))
        return digest(*parts)


def adapter_digest(adapter: Adapter) -> bytes | None:
    """Of the bytes of an adapter's files; None if they have changed since the adapter was found."""
    try:
        content = digest(*(file_digest(adapter.directory / name) for name in (CONFIG, ADAPTER_WEIGHTS)))
        return content if stamp_of(adapter.directory) == adapter.stamp else None
    except Exception:  # whatever is wrong with the files, the request itself will say
        return None


def _tile(block_size: int, backend: AttentionBackend, device: torch.device) -> int:
    """Keys after which attention merges what it has: sums of blocks with the same tile have the same order."""
    tiled = device.type == "cpu" and is_chunk_invariant(backend) and block_size % KEY_TILE == 0
    return KEY_TILE if tiled else block_size


def facts_of(config: EngineConfig, runner: ModelRunner) -> dict[str, Any]:
    """All that the bits of a rank depend on besides files and tokens. Lengths and memory are not among it."""
    layout = runner.kv_cache.pools.layout
    device = runner.device.torch_device
    kv_dtype = runner.kv_cache.pools.resident.dtype
    backend = runner.kv_cache.backend
    facts: dict[str, Any] = {
        "format": files.MAGIC.decode(),
        "unit": UNIT,
        "torch": torch.__version__,
        "network": runner.network,
        "overrides": config.hf_overrides,
        "random": (config.load_format, config.seed) if config.load_format == "dummy" else None,
        "dtypes": (str(runner.dtype), str(kv_dtype), config.kv_cache_dtype),
        "geometry": (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.row_bytes, layout.windows),
        "heads": layout.heads,
        "groups": [(group.window, group.layers) for group in layout.groups],
        "attention": (backend.name, [_tile(group.block_size, backend, device) for group in layout.groups]),
        "batch_invariant": config.batch_invariant is not False,
        "kernels": cpu_kernel_choice().setting,
        "device": device.type,
        "ranks": config.tensor_parallel_size,
    }
    if device.type == "cuda":
        facts["device"] = (torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
        facts["libraries"] = (torch.version.cuda, library_versions())
    return facts


def library_versions() -> list[tuple[str, str]]:
    """Of the installed libraries besides torch whose kernels, or whose compiler's, compute on a GPU."""
    installed = packages_distributions()
    names = {name for module in GPU_MODULES for name in installed.get(module, ())}
    return [(name, version(name)) for name in sorted(names)]


def digest_of_facts(facts: Mapping[str, Any]) -> bytes:
    """The same in every process."""
    return digest(json.dumps(facts, sort_keys=True, default=_plain).encode())


def _plain(value: Any) -> Any:
    """A value that JSON does not know, as one that it knows."""
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, {field.name: getattr(value, field.name) for field in fields(value)}]
    return sorted(map(repr, value)) if isinstance(value, set | frozenset) else repr(value)
