"""The tensors of a GGUF file under their names in Hugging Face format, and their data."""

from __future__ import annotations

import mmap
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nanovllm.errors import ModelError, quoted
from nanovllm.gguf.config import ROPE_FACTORS, rotated_heads
from nanovllm.gguf.header import GgufTensor, read_header
from nanovllm.gguf.names import hugging_face_name
from nanovllm.models.checkpoint import StoredTensor

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def list_tensors(path: Path) -> dict[str, StoredTensor]:
    """See `model_files.gguf_side.GgufSide`. Shapes count numbers, also those of packed matrices."""
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


def read_tensor(tensor: GgufTensor, heads: int | None = None) -> Tensor:
    """The tensor's data: numbers in its shape, or of a packed type the bytes [rows, bytes of a row].

    heads: the number of heads whose rows llama.cpp has put into another order for RoPE; they are put back.
    """
    # Memory of its own, which goes back to the system with the tensor: malloc would keep some of it.
    data = mmap.mmap(-1, max(1, tensor.num_bytes))
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        count = file.readinto(memoryview(data)[: tensor.num_bytes])
    if count < tensor.num_bytes:
        raise ModelError(
            f"{tensor.file} is truncated: tensor {quoted(tensor.name)} at byte {tensor.offset} has {tensor.num_bytes} "
            f"bytes, and only {count} could be read; copy it again."
        )
    values = torch.frombuffer(data, dtype=torch.uint8)[: tensor.num_bytes]
    if tensor.type.name in DTYPES:
        values = values.view(DTYPES[tensor.type.name]).reshape(tensor.shape)
    else:
        values = values.view(-1, tensor.row_bytes)
    return values if heads is None else _in_halves(values, heads)


def _in_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of heads, in which the two numbers of a rotated pair are neighbours, with them half a head apart instead."""
    if rows.shape[0] % (2 * heads):
        return rows  # a shape that the loader has refused
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(rows.shape)
