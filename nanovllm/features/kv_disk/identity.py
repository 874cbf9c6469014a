"""Digests of what decides the bits of K and V, besides the tokens: the model, how it is computed, an adapter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from nanovllm.features.kv_disk.drafts import replace_json
from nanovllm.features.kv_disk.inspect import DIGESTS
from nanovllm.features.kv_disk.records import KEY_BYTES

READ_BYTES = 1 << 20
WEIGHTS = (".safetensors", ".gguf")
PACKAGE = Path(__file__).parents[2]
APPLICATIONS = "apps"  # in the package: all else is the engine
CODE = (".py", ".so", ".json")  # the last: tables of tuned kernels, whose tiles decide the order of sums


def digest(*parts: bytes) -> bytes:
    """Of the parts with their lengths, so that no others have the same."""
    found = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def plain(value: Any) -> Any:
    """A value as JSON can write it, the same in every process."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"": type(value).__name__, **{field.name: plain(getattr(value, field.name)) for field in fields(value)}}
    if isinstance(value, Mapping):
        return sorted((str(key), plain(item)) for key, item in value.items())
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else repr(value)


def digest_of_fields(known: Mapping[str, Any]) -> bytes:
    return digest(json.dumps(plain(known), sort_keys=True).encode())


def model_files(model: str | Path) -> list[Path]:
    """The files that decide a model's numbers: its weights and its config."""
    path = Path(model)
    if path.is_file():
        return [path]
    return sorted(each for each in path.iterdir() if each.suffix in WEIGHTS or each.name == "config.json")


def code_files(package: Path = PACKAGE) -> list[Path]:
    """The engine's code, extensions and tables: what reads weights decides bits as kernels do."""
    files = (path for path in package.rglob("*") if path.suffix in CODE and path.is_file())
    return sorted(path for path in files if path.relative_to(package).parts[0] != APPLICATIONS)


def file_digest(path: Path, goes_on: Callable[[], None] = lambda: None) -> bytes:
    """Of the file's bytes. goes_on: called now and then. Raises OSError."""
    found = hashlib.blake2b(digest_size=KEY_BYTES)
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while number := file.readinto(buffer):
            found.update(buffer[:number])
            goes_on()
    return found.digest()


class FileDigests:
    """Digests of large files, kept in `root` by path, size and times, so that a file is read once."""

    def __init__(self, root: Path, goes_on: Callable[[], None] = lambda: None) -> None:
        """goes_on: called now and then."""
        self._path = root / DIGESTS
        self._goes_on = goes_on

    def of(self, paths: Iterable[Path]) -> bytes:
        """One digest of all these files' names and bytes. Raises OSError."""
        known = self._known()
        parts = list[bytes]()
        before = dict(known)
        for path in paths:
            self._goes_on()
            found = path.stat()
            times = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)
            key = f"{path.resolve()}:{':'.join(map(str, times))}"
            if key not in known:
                known[key] = file_digest(path, self._goes_on).hex()
            parts += (path.name.encode(), bytes.fromhex(known[key]))
        if known != before:
            self._keep(known)
        return digest(*parts)

    def _known(self) -> dict[str, str]:
        try:
            found = json.loads(self._path.read_text())
            return {str(key): str(value) for key, value in found.items() if len(bytes.fromhex(value)) == KEY_BYTES}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def _keep(self, known: dict[str, str]) -> None:
        """Replace the file at once, so that another process reads the old or the new one; a failure only costs time."""
        with suppress(OSError):
            replace_json(self._path, known)
