"""The safetensors files of a model directory, and the tensors in each."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanovllm.data.json_fields import OBJECT, checked_fields, read_json_object
from nanovllm.data.memory_checks import check_fits, gib
from nanovllm.device.memory import address_space_left
from nanovllm.errors import ConfigError, ModelError, quoted, told
from nanovllm.formats.hub import INDEX
from nanovllm.layers.linear_method import Part

logger = logging.getLogger(__name__)

SINGLE = "model.safetensors"
MAPPINGS = 2  # of one file at the same time: by the safetensors library and by torch
QUOTED = 200  # characters of a tensor's name, with its shapes, in a message
# What is read of a file before it is opened anew: pages that stay mapped would add up to a second copy of the weights.
REOPEN_BYTES = 64 << 20
READ_AROUND = 128 << 10  # bytes that Linux maps beside those of a tensor, at both ends


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as its file's header describes it, without its data. It may be part of a tensor of the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' code, such as BF16; for GGUF its type, such as Q4_K
    # Reads the data, or what slices of the first axes select of it; None for safetensors.
    read: Callable[[tuple[slice, ...]], Tensor] | None = None
    # Of a part: the name of the tensor of the file, and what the part takes of each of that tensor's first axes.
    whole: tuple[str, Sequence[int | range]] | None = None
    transposed: bool = False  # the part has two axes, and they are exchanged

    def selected(self, view: Any, part: tuple[slice, ...]) -> Tensor:
        """What slices of the first axes select of this tensor. view: the tensor of the file."""
        if self.transposed:
            part = (*part, slice(None), slice(None))[1::-1]
        kept = iter(part)
        taken = () if self.whole is None else self.whole[1]
        chosen = [axis if isinstance(axis, int) else axis[next(kept, slice(None))] for axis in taken]
        tensor: Tensor = view[(*(axis if isinstance(axis, int) else _as_slice(axis) for axis in chosen), *kept)]
        # The safetensors library knows no steps.
        steps = tuple(slice(None, None, axis.step) for axis in chosen if isinstance(axis, range))
        tensor = tensor[steps] if any(step.step > 1 for step in steps) else tensor
        return tensor.T if self.transposed else tensor


def _as_slice(indices: range) -> slice:
    return slice(indices.start, indices[-1] + 1 if indices else indices.start)


def part_of(tensor: StoredTensor, name: str, *index: int | slice, transposed: bool = False) -> StoredTensor:
    """A part of a tensor, or all of it. name: of the tensor of the file. index: what to take of the first axes."""
    taken = [
        range(*part.indices(size)) if isinstance(part, slice) else part
        for part, size in zip(index, tensor.shape, strict=False)
    ]
    kept = [axis for axis in taken if isinstance(axis, range)]
    shape = (*map(len, kept), *tensor.shape[len(index) :])
    whole = (name, taken) if tensor.whole is None else (tensor.whole[0], _part_of_ranges(tensor.whole[1], taken))
    return StoredTensor(tensor.file, shape[::-1] if transposed else shape, tensor.dtype, None, whole, transposed)


def _part_of_ranges(outer: Sequence[int | range], inner: Sequence[int | range]) -> list[int | range]:
    """What a part of a part takes of the axes of the whole tensor. outer: of the part; inner: of the part's part."""
    rest = iter(inner)
    taken = list[int | range]()
    for axis in outer:
        index = None if isinstance(axis, int) else next(rest, None)
        if index is None or isinstance(axis, int):
            taken.append(axis)
        else:
            taken.append(axis[index] if isinstance(index, int) else axis[index.start : index.stop : index.step])
    return [*taken, *rest]


def some_of(names: Iterable[str], limit: int = 5) -> str:
    """The number of names and the first few of them, for messages: "3: a, b, c"."""
    listed = [name if name.isprintable() and len(name) <= QUOTED else quoted(name) for name in names]
    more = f", and {len(listed) - limit} more" if len(listed) > limit else ""
    return f"{len(listed)}: {', '.join(listed[:limit])}{more}"


def list_tensors(directory: Path, *, says_so: bool = False) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in a directory, by name. Reads headers only.

    Of several files, the tensors that the index lists are taken, as in Transformers. says_so: the log says how many
    others there are. Raises ModelError if there are no safetensors files, if one is damaged, or if a listed tensor is
    not where the index says.
    """
    if (directory / SINGLE).is_file():
        return headers(directory / SINGLE)
    path = directory / INDEX
    if not path.is_file():
        raise ModelError(_no_weights(directory))
    index = checked_fields(path, read_json_object(path), {"weight_map": OBJECT}).get("weight_map")
    if not index:
        raise ModelError(f"{path} has no weight_map that says which tensor is in which file.")
    for shard in index.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelError(f"{path} names {quoted(shard)}, which is not a file of its own directory.")
    shards = sorted(set(index.values()))
    if absent := [shard for shard in shards if not os.path.isfile(directory / shard)]:
        raise ModelError(f"{path} names files that do not exist ({some_of(absent)}).")
    stored = {shard: headers(directory / shard) for shard in shards}
    if lacking := [f"{name} in {shard}" for name, shard in index.items() if name not in stored[shard]]:
        raise ModelError(f"{path} lists tensors that its files do not hold ({some_of(lacking)}); copy it again.")
    others = sum(map(len, stored.values())) - len(index)
    if says_so and others:
        logger.warning("%s: tensors that %s does not list are not read (%d)", directory, INDEX, others)
    return {name: stored[shard][name] for name, shard in index.items()}


class TensorReader:
    """Reads tensors one after the other. Close it at the end.

    A safetensors file stays open for the next tensors, until REOPEN_BYTES of it have been read.
    """

    def __init__(self) -> None:
        self._open = ExitStack()
        self._file: Path | None = None
        self._tensors: Any = None
        self._num_read = 0  # bytes, since the file was opened

    def read(self, name: str, stored: StoredTensor, part: Part = ()) -> Tensor:
        """The tensor's data, or a part of it. Raises as `open_file`."""
        if stored.read is not None:
            return joined(stored.read, part)
        if stored.file != self._file or self._num_read >= REOPEN_BYTES:
            self.close()
            self._tensors = self._open.enter_context(open_file(stored.file))
            self._file = stored.file
        with _file_errors(stored.file):
            tensor = self._selected(name, stored, part)
        # Even a small part may touch every page of the tensor.
        self._num_read += math.prod(stored.shape) * tensor.element_size() + READ_AROUND
        return tensor

    def _selected(self, name: str, stored: StoredTensor, part: Part) -> Tensor:
        if stored.whole is None and not part:
            whole: Tensor = self._tensors.get_tensor(name)
            return whole
        view = self._tensors.get_slice(name if stored.whole is None else stored.whole[0])
        return joined(lambda slices: stored.selected(view, slices), part)

    def close(self) -> None:
        self._open.close()
        self._file = None
        self._tensors = None
        self._num_read = 0


def joined(read: Callable[[tuple[slice, ...]], Tensor], part: Part) -> Tensor:
    """A part of a tensor, with one or several slices of each axis. read: gives what one slice of each selects."""
    tensors = [read(slices) for slices in product(*part)]
    if len(tensors) == 1:
        return tensors[0]
    (axis,) = (index for index, slices in enumerate(part) if len(slices) > 1)
    return torch.cat(tensors, axis)


@contextmanager
def open_file(path: Path, framework: str = "pt") -> Iterator[Any]:
    """A safetensors file, mapped into memory but not read.

    framework: of the tensors, "pt" or "np". "np" is enough for headers and needs no second mapping by torch. Raises
    ModelError if the file is truncated or damaged, and ConfigError if it cannot be mapped, for instance under
    `ulimit -v`.
    """
    left = address_space_left()
    if left is not None:
        with _file_errors(path):
            size = MAPPINGS * path.stat().st_size
        what = f"{path} is mapped to be read, which takes"
        check_fits(what, size, left, "ulimit -v leaves", "raise it, or split the checkpoint into smaller files")
    with _file_errors(path), safe_open(path, framework=framework, device="cpu") as file:
        yield file


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is truncated or damaged ({told(error)}); copy it again.") from error
    except RuntimeError as error:  # torch's
        if "mmap" not in str(error):
            raise
        raise ConfigError(
            f"{path} cannot be mapped to be read: {gib(path.stat().st_size)} are more than the system has; split "
            "the checkpoint into smaller files"
        ) from error


def headers(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file, by name. Raises as `open_file`."""
    with open_file(path, "np") as file:
        parts = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118 - not a mapping
        return {name: StoredTensor(path, tuple(part.get_shape()), part.get_dtype()) for name, part in parts}


def _no_weights(directory: Path) -> str:
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
    if pickled:
        return (
            f"{directory} has no {SINGLE} and no {INDEX}, but pickled files ({some_of(pickled)}). Only "
            "safetensors are read; convert it with Transformers: from_pretrained(...).save_pretrained(...)."
        )
    others = sorted(file.name for file in directory.glob("*.safetensors"))
    hint = f", but other safetensors ({some_of(others)})" if others else ""
    return f"{directory} has no {SINGLE} and no {INDEX}{hint}."
