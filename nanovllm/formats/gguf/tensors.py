"""The tensors of a GGUF file under their names in Hugging Face format, and their data."""

from __future__ import annotations

import mmap
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.errors import ModelError, quoted
from nanovllm.formats.checkpoint import StoredTensor
from nanovllm.formats.gguf.config import ROPE_FACTORS, rotated_heads
from nanovllm.formats.gguf.header import GgufTensor, read_header
from nanovllm.formats.gguf.names import hugging_face_name

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def list_tensors(path: Path) -> dict[str, StoredTensor]:
    """Each tensor by its name in Hugging Face format. Shapes count numbers, also those of packed matrices.

    Raises ModelError for a file that is damaged or not supported.
    """
    header = read_header(path)
    heads = rotated_heads(header)
    found = {}
    for name, tensor in header.tensors.items():
        if name == ROPE_FACTORS:
            continue
        module = name.rpartition(".")[0].rpartition(".")[2]
        found[hugging_face_name(name)] = StoredTensor(
            tensor.file, tensor.shape, tensor.type.name, partial(read_tensor, tensor, heads.get(module))
        )
    return found


def read_tensor(tensor: GgufTensor, heads: int | None, part: tuple[slice, ...] = ()) -> Tensor:
    """The tensor's data: numbers in its shape, or of a packed type the bytes [rows, bytes of a row].

    heads: the number of heads whose rows llama.cpp has put into another order for RoPE; they are put back. part: what
    is read, as slices of the first axes: rows of whole heads, and columns of whole blocks.
    """
    num_rows, num_columns = tensor.shape if len(tensor.shape) == 2 else (tensor.shape[0], 1)
    everything = slice(None)
    rows, columns = (
        range(size)[kept] for size, kept in zip((num_rows, num_columns), (*part, everything, everything), strict=False)
    )
    data = _read_bytes(tensor, rows, columns, num_columns)
    values = torch.from_numpy(data).view(len(rows), -1)
    if tensor.type.name in DTYPES:
        values = values.view(DTYPES[tensor.type.name])
    if len(tensor.shape) == 1:
        values = values.flatten()
    return values if heads is None else _in_halves(values, heads * len(rows) // num_rows)


def _read_bytes(tensor: GgufTensor, rows: range, columns: range, num_columns: int) -> Any:
    """The bytes of rows and columns of a matrix [., num_columns], a piece of the file after the other."""
    block = tensor.type
    first, size, row_bytes = (
        number // block.block_size * block.block_bytes for number in (columns.start, len(columns), num_columns)
    )
    if size == row_bytes:
        starts, shape = [rows.start * row_bytes], (1, len(rows) * row_bytes)
    else:
        starts, shape = [row * row_bytes + first for row in rows], (len(rows), size)
    # Memory of its own, which goes back to the system with the tensor: malloc would keep some of it.
    data = np.ndarray(shape, np.uint8, mmap.mmap(-1, max(1, shape[0] * shape[1]), flags=mmap.MAP_PRIVATE))
    with tensor.file.open("rb") as file:
        for piece, start in zip(data, starts, strict=True):
            file.seek(tensor.offset + start)
            num_read = file.readinto(piece.data)
            if num_read < len(piece):
                raise ModelError(
                    f"{tensor.file} is truncated: tensor {quoted(tensor.name)} at byte {tensor.offset} has "
                    f"{tensor.num_bytes} bytes, and only {start + num_read} could be read; copy it again."
                )
    return data


def _in_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of heads, in which the two numbers of a rotated pair are neighbours, with them half a head apart instead."""
    if rows.shape[0] % (2 * heads):
        return rows  # a shape that the loader has refused
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(rows.shape)
