"""Stand-ins for Triton's kernels: what each computes, in torch's operators, far faster than the interpreter.

A stand-in gets the arguments of a launch by their names in the kernel, with tensors over the memory of the device, and
reads strides, offsets and counts from them as the kernel does. `test_stand_ins.py` holds each against the interpreter.
Attention is computed in fp64, so that the bits of a row do not depend on the others, as those of the kernels do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

LN2 = math.log(2.0)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def strided(tensor: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> Tensor:
    """What a kernel sees from a pointer to the tensor on."""
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)


# ---- rows


def gated_unit(a: Any) -> None:
    rows = a.grid[0]
    gate, up = strided(a.gate_up_ptr, (rows, 2, a.size), (a.row_stride, a.size, 1)).float().unbind(1)
    logit = gate
    if a.ACTIVATION == "clamped_swiglu":
        gate = gate.clamp(max=7.0)
        up = (up.clamp(-7.0, 7.0) + 1.0).to(a.out_ptr.dtype).float()
        logit = 1.702 * gate
    if a.ACTIVATION == "gelu_tanh":
        logit = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    activated = (gate / (1.0 + torch.exp(-logit))).to(a.out_ptr.dtype).float()
    strided(a.out_ptr, (rows, a.size), (a.size, 1)).copy_(activated * up)


def norm(a: Any) -> None:
    sizes = (a.grid[0], a.size)
    x = strided(a.x_ptr, sizes, (a.x_stride, 1))
    if a.ADD:
        residual = strided(a.residual_ptr, sizes, (a.residual_stride, 1))
        x = residual.copy_(residual.float() + x.float())
    out = strided(a.out_ptr, sizes, (a.out_stride, 1))
    out.copy_(_normalised(x.float(), a.weight_ptr, a.size, a.eps) * a.weight_ptr.float())


def _normalised(x: Tensor, weight: Tensor, size: int, eps: float) -> Tensor:
    return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) / size + eps)).to(weight.dtype).float()


def heads(a: Any) -> None:
    tokens = a.grid[0]
    rotated = a.num_heads + a.num_kv_heads
    size = 2 * a.half
    x = strided(a.heads_ptr, (tokens, rotated + a.num_kv_heads, size), (a.token_stride, size, 1))
    wide = x[:, :rotated].float()
    if a.HAS_NORM:
        weight = strided(a.weight_ptr, (rotated, size), (size, 1))
        wide = (_normalised(wide, weight, size, a.eps) * weight.float()).to(x.dtype).float()
    cos = strided(a.cos_ptr, (tokens, 1, a.half), (a.cos_stride, a.half, 1))
    sin = strided(a.sin_ptr, (tokens, 1, a.half), (a.sin_stride, a.half, 1))
    first = wide[..., : a.half]
    second = wide[..., a.half :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    strided(a.q_ptr, (tokens, a.num_heads, size), (a.q_stride, size, 1)).copy_(turned[:, : a.num_heads])
    strided(a.k_ptr, (tokens, a.num_kv_heads, size), (a.k_stride, size, 1)).copy_(turned[:, a.num_heads :])
    strided(a.v_ptr, (tokens, a.num_kv_heads, size), (a.v_stride, size, 1)).copy_(x[:, rotated:])


def draw(a: Any) -> None:
    from nanovllm.ops.torch_rows import gumbel_noise

    rows = a.grid[0]
    tokens = strided(a.tokens_ptr, (rows, a.width), (a.tokens_stride, 1))
    noise = gumbel_noise(tokens, strided(a.starts_ptr, (rows,), (1,)))
    values = strided(a.scores_ptr, (rows, a.width), (a.scores_stride, 1)).double() + noise
    best, index = (strided(each, (rows, a.tiles), (a.tiles, 1)) for each in (a.best_ptr, a.index_ptr))
    for tile in range(a.tiles):
        start = tile * a.BLOCK
        best[:, tile], index[:, tile] = values[:, start : start + a.BLOCK].max(1)
        index[:, tile] += start


def store(a: Any) -> None:
    heads = a.grid[1]
    slots = a.slots_ptr[: a.tokens]
    blocks = len(a.pool_ptr)
    strides = (a.block_stride, a.kv_stride, a.head_stride, a.head_dim, 1)
    pool = strided(a.pool_ptr, (blocks, 2, heads, a.block_size, a.head_dim), strides)
    kept = slots >= 0
    block = slots[kept] // a.block_size
    offset = slots[kept] % a.block_size
    sizes = (a.tokens, heads, a.head_dim)
    pool[block, 0, :, offset] = strided(a.k_ptr, sizes, (a.k_token_stride, a.k_head_stride, 1))[kept]
    pool[block, 1, :, offset] = strided(a.v_ptr, sizes, (a.v_token_stride, a.v_head_stride, 1))[kept]


# ---- 8 bits


def _quantized(x: Tensor, largest: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The bytes of rows of fp32 x as int8, and their scales."""
    scale = (x.abs().amax(-1) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    quotient = x / scale.unsqueeze(-1)
    return (quotient.round() if dtype == torch.int8 else quotient).to(dtype).view(torch.int8), scale


def quantize(a: Any) -> None:
    sizes = (a.rows // a.heads, a.heads, a.head_dim)
    x = strided(a.x_ptr, sizes, (a.token_stride, a.head_stride, 1)).float()
    elements, scales = _quantized(x, a.largest, torch.int8 if a.FORMAT == 1 else torch.float8_e4m3fn)
    row = a.head_dim + 4
    strided(a.rows_ptr, sizes, (a.heads * row, row, 1)).copy_(elements)
    strided(a.scales_ptr, sizes[:2], (a.heads * (row // 4), row // 4), a.head_dim // 4).copy_(scales)


def round_inputs(a: Any) -> None:
    groups = a.grid[1]
    x = strided(a.x_ptr, (a.rows, a.in_features), (a.x_stride, 1)).float()
    rounded = strided(a.rounded_ptr, (a.rows, a.in_features), (a.in_features, 1))
    scales = strided(a.scales_ptr, (a.rows, groups), (1, a.scale_stride))
    for group, part in enumerate(x.split(a.group_size, 1)):
        elements, scales[:, group] = _quantized(part, 448.0, torch.float8_e4m3fn)
        rounded[:, group * a.group_size : (group + 1) * a.group_size] = elements


# ---- attention


def _sequences(a: Any) -> Iterator[SimpleNamespace]:
    names = ("start", "rows", "block_start", "blocks", "first", "kv_end", "position", "before")
    for row in strided(a.rows_ptr, (a.grid[2], 8), (8, 1)).tolist():
        yield SimpleNamespace(**dict(zip(names, row, strict=True)))


def _block(a: Any, head_stride: int, kv_heads: int, number: int, tokens: int | None = None) -> Tensor:
    """K and V of a block, or of its first tokens, in fp64: [2, kv_heads, block_size, head_dim]."""
    sizes = (2, kv_heads, a.block_size if tokens is None else tokens)
    strides = (a.kv_stride, head_stride, a.row_size)
    stored = strided(a.pool_ptr, (*sizes, a.head_dim), (*strides, 1), number * a.block_stride)
    if not a.FORMAT:
        return stored.double()
    if a.FORMAT == 2:
        stored = stored.contiguous().view(torch.float8_e4m3fn)
    offset = (number * a.block_stride + a.head_dim) // 4
    scales = strided(a.scales_ptr, sizes, tuple(stride // 4 for stride in strides), offset)
    return stored.float().double() * scales.double().unsqueeze(-1)


def _attended(
    a: Any, q: Tensor, kv: Tensor, seq: SimpleNamespace, first: int, slopes: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax sums of rows q [rows, heads, head_dim] over the keys from position `first` on: the weighted sum of values
    [rows, heads, head_dim], the maximum of log2 and the sum of weights [rows, heads]; fp64."""
    rows, num_heads, _ = q.shape
    keys = min(kv.shape[2], seq.kv_end - first, seq.position + rows - first)
    if keys <= 0:
        return torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf), torch.zeros_like(q[..., 0])
    k, v = kv[:, :, :keys].repeat_interleave(num_heads // kv.shape[1], 1)
    scores = torch.matmul(q.transpose(0, 1), k.transpose(1, 2)) * (a.scale / LN2)
    distance = seq.position + torch.arange(rows).unsqueeze(1) - first - torch.arange(keys)
    if slopes is not None:
        scores -= slopes.double()[:, None, None] / LN2 * distance
    hidden = (distance < 0) | (distance >= a.window) if a.HAS_WINDOW else distance < 0
    scores.masked_fill_(hidden, -math.inf)
    top = scores.amax(-1)
    weights = torch.exp2(scores - top.masked_fill(top == -math.inf, 0.0).unsqueeze(-1))
    return torch.matmul(weights, v).transpose(0, 1), top.t(), weights.sum(-1).t()


def _merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """`merge_rows` of the kernels: out, other [rows, heads, head_dim], lse, other_lse [rows, heads], fp32."""
    top = torch.maximum(lse, other_lse)
    weight = torch.exp(torch.where(lse == top, 0.0, lse - top))
    other_weight = torch.exp(torch.where(other_lse == top, 0.0, other_lse - top))
    total = weight + other_weight
    out = out * (weight / total).unsqueeze(-1) + other * (other_weight / total).unsqueeze(-1)
    return out, top + torch.log(total)


def _normalised_sums(acc: Tensor, top: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """(output, LSE) in fp32 of softmax sums; 0 and -inf for a row without keys."""
    mass = torch.where(total > 0, total, 1.0)
    lse = torch.where(total > 0, (top + torch.log2(mass)) * LN2, -math.inf)
    return (acc / mass.unsqueeze(-1)).float(), lse.float()


def _state(a: Any, seq: SimpleNamespace, num_heads: int) -> tuple[Tensor, Tensor]:
    """The sequence's rows of (out [rows, heads, head_dim], lse [rows, heads])."""
    strides = (a.out_token_stride, a.out_head_stride, 1)
    out = strided(a.out_ptr, (seq.rows, num_heads, a.head_dim), strides, seq.start * a.out_token_stride)
    strides = (a.lse_token_stride, a.lse_head_stride)
    return out, strided(a.lse_ptr, (seq.rows, num_heads), strides, seq.start * a.lse_token_stride)


def _queries(a: Any, seq: SimpleNamespace, num_heads: int) -> Tensor:
    strides = (a.q_token_stride, a.q_head_stride, 1)
    return strided(a.q_ptr, (seq.rows, num_heads, a.head_dim), strides, seq.start * a.q_token_stride).double()


def prefill(a: Any) -> None:
    num_heads = a.grid[1]
    for seq in _sequences(a):
        q = _queries(a, seq, num_heads)
        (out, lse) = _state(a, seq, num_heads)
        for index, number in enumerate(strided(a.blocks_ptr, (seq.blocks,), (1,), seq.block_start).tolist()):
            first = seq.first + index * a.block_size
            if first < min(seq.kv_end, seq.position + seq.rows):
                kv = _block(a, a.kv_head_stride, num_heads // a.group, number)
                found = _merged(out, lse, *_normalised_sums(*_attended(a, q, kv, seq, first)))
                out.copy_(found[0])
                lse.copy_(found[1])


def decode(a: Any) -> None:
    kv_heads = a.grid[1]
    sums = (a.parts_here, a.total_rows, a.heads)
    strides = (a.total_rows * a.heads, a.heads, 1)
    acc = strided(a.acc_ptr, (*sums, a.BLOCK_D), (*(stride * a.BLOCK_D for stride in strides), 1))
    top = strided(a.top_ptr, sums, strides)
    total = strided(a.total_ptr, sums, strides)
    for seq in _sequences(a):
        q = _queries(a, seq, a.heads)
        rows = slice(seq.before, seq.before + seq.rows)
        for part in range(a.first_part, min(a.first_part + a.parts_here, seq.blocks * a.parts)):
            index = part // a.parts
            begin = part % a.parts * a.PARTITION
            number = int(a.blocks_ptr[seq.block_start + index])
            kv = _block(a, a.head_stride, kv_heads, number)[:, :, begin : begin + a.PARTITION]
            first = seq.first + index * a.block_size + begin
            found = _attended(a, q, kv, seq, first, a.slopes_ptr if a.HAS_SLOPES else None)
            acc[part - a.first_part, rows, :, : a.head_dim] = found[0].float()
            acc[part - a.first_part, rows, :, a.head_dim :] = 0.0
            top[part - a.first_part, rows], total[part - a.first_part, rows] = found[1].float(), found[2].float()


def reduce(a: Any) -> None:
    num_heads = a.grid[1]
    sums = (a.blocks_here, a.PARTS, a.total_rows, num_heads)
    strides = (a.total_rows * a.heads, a.heads, 1)
    of_parts = (a.PARTS * strides[0], *strides)
    every_acc = strided(a.acc_ptr, (*sums, a.BLOCK_D), (*(stride * a.BLOCK_D for stride in of_parts), 1))
    every_top = strided(a.top_ptr, sums, of_parts)
    every_total = strided(a.total_ptr, sums, of_parts)
    blocks = (sums[0], *sums[2:])
    outs = strided(a.outs_ptr, (*blocks, a.BLOCK_D), (*(stride * a.BLOCK_D for stride in strides), 1))
    lses = strided(a.lses_ptr, blocks, strides)
    for seq in _sequences(a):
        sizes = (seq.rows, num_heads)
        first = seq.start * a.lse_token_stride
        out = torch.zeros(*sizes, a.head_dim)
        lse = torch.full(sizes, -math.inf)
        if a.START == "state":
            of_state = (a.state_token_stride, a.state_head_stride, 1)
            out = strided(a.state_ptr, (*sizes, a.head_dim), of_state, seq.start * a.state_token_stride)
            lse = strided(a.state_lse_ptr, sizes, (a.lse_token_stride, a.lse_head_stride), first)
        if a.START == "sinks":
            lse = a.state_lse_ptr.expand(sizes)
        for index in range(min(seq.blocks - a.first_block, a.blocks_here)):
            rows = slice(seq.before, seq.before + seq.rows)
            acc, top, total = (every[index, :, rows] for every in (every_acc, every_top, every_total))
            highest = top.amax(0)
            weight = torch.exp2(top - torch.where(highest == -math.inf, 0.0, highest))
            of_block = _normalised_sums((weight.unsqueeze(-1) * acc).sum(0), highest, (weight * total).sum(0))
            if a.PARTS > 1:
                outs[index, rows], lses[index, rows] = of_block
            out, lse = _merged(out, lse, of_block[0][..., : a.head_dim], of_block[1])
        of_out = (a.out_token_stride, a.out_head_stride, 1)
        strided(a.out_ptr, (*sizes, a.head_dim), of_out, seq.start * a.out_token_stride).copy_(out)
        if a.KEEP_LSE:
            strided(a.lse_ptr, sizes, (a.lse_token_stride, a.lse_head_stride), first).copy_(lse)


def merge(a: Any) -> None:
    num_heads = a.grid[1]
    sizes = (a.tokens, num_heads, a.head_dim)
    out = strided(a.first_ptr, sizes, (a.first_token_stride, a.first_head_stride, 1)).float()
    lse = strided(a.first_lse_ptr, sizes[:2], (a.first_lse_token_stride, a.first_lse_head_stride))
    for number in range(a.num_parts):
        strides = (a.part_token_stride, a.part_head_stride, 1)
        part = strided(a.parts_ptr, sizes, strides, number * a.part_stride).float()
        strides = (a.part_lse_token_stride, a.part_lse_head_stride)
        out, lse = _merged(out, lse, part, strided(a.part_lses_ptr, sizes[:2], strides, number * a.part_lse_stride))
    strided(a.out_ptr, sizes, (a.out_token_stride, a.out_head_stride, 1)).copy_(out)
    strided(a.lse_ptr, sizes[:2], (a.lse_token_stride, a.lse_head_stride)).copy_(lse)


def merge_segments(a: Any) -> None:
    sizes = (a.tokens, a.grid[1], a.head_dim)
    out = strided(a.out_ptr, sizes, (a.out_token_stride, a.out_head_stride, 1))
    lse = strided(a.lse_ptr, sizes[:2], (1, a.lse_head_stride))
    merged = out.clone()
    merged_lse = lse.clone()
    for number in range(a.PARTS):
        part = getattr(a, f"p{number}")
        part_lse = getattr(a, f"l{number}")
        part = strided(part, sizes, (a.part_token_stride, a.part_head_stride, 1)).float()
        merged, merged_lse = _merged(
            merged, merged_lse, part, strided(part_lse, sizes[:2], (1, a.part_lse_head_stride))
        )
    out.copy_(merged)
    lse.copy_(merged_lse)


def gather(a: Any) -> None:
    kv_heads = a.heads // a.repeats
    for number, at, tokens in strided(a.entries_ptr, (a.grid[2], 3), (3, 1)).tolist():
        kv = _block(a, a.kv_head_stride, kv_heads, number, tokens)
        strides = (a.out_kv_stride, a.out_head_stride, a.head_dim, 1)
        out = strided(a.out_ptr, (2, a.heads, tokens, a.head_dim), strides, at * a.head_dim)
        out.copy_(kv.float().repeat_interleave(a.repeats, 1))


# ---- products


def _packed_weight(a: Any, group_size: int) -> tuple[Tensor, Tensor]:
    """The scales of packed weights by inputs, in fp64, and their values."""
    data = strided(a.data_ptr, (a.out_features, a.row_bytes), (a.row_bytes, 1))
    group = torch.arange(a.in_features) // group_size
    scales = strided(a.scales_ptr, (a.out_features, a.scale_columns), (a.scale_columns, 1))
    if a.SCHEME in ("int4", "mxfp4"):
        data = torch.stack((data & 15, data >> 4), -1).flatten(1)
    if a.SCHEME == "int8":
        data = data.view(torch.int8)
    if a.SCHEME == "fp8":
        data = data.view(torch.float8_e4m3fn)
    if a.SCHEME == "mxfp4":
        data = E2M1[data.int()]
        scales = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
    values = data[:, : a.in_features].float()
    if a.HAS_ZEROS:
        values -= strided(a.zeros_ptr, scales.shape, (a.scale_columns, 1))[:, group].float()
    elif a.SCHEME == "int4":
        values -= 8
    return scales[:, group].double(), values.double()


def packed(a: Any) -> None:
    group_size = a.GROUP_PARTS * a.BLOCK_K or a.in_features
    scales, values = _packed_weight(a, group_size)
    weight = values * scales
    x = strided(a.x_ptr, (a.rows, a.in_features), (a.x_stride, 1)).float().double()
    if a.FP8_INPUTS:
        groups = torch.arange(a.in_features) // group_size
        x *= strided(a.x_scales_ptr, (a.rows, a.scale_columns), (1, a.rows))[:, groups].double()
    out = strided(a.out_ptr, (a.SPLITS, a.rows, a.out_features), (a.rows * a.out_features, a.out_features, 1))
    step = a.BLOCK_K * a.UNROLL
    each = math.ceil(math.ceil(a.in_features / step) / a.SPLITS) * step
    for split in range(a.SPLITS):
        columns = slice(split * each, (split + 1) * each)
        total = x[:, columns] @ weight[:, columns].t()
        out[split] = (total + a.bias_ptr.double() if a.HAS_BIAS else total).to(out.dtype)


def few_rows(a: Any) -> None:
    x = strided(a.x_ptr, (a.rows, a.in_features), (a.x_stride, 1)).double()
    total = x @ strided(a.weight_ptr, (a.out_features, a.in_features), (a.weight_stride, 1)).double().t()
    if a.HAS_BIAS:
        total += strided(a.bias_ptr, (a.out_features,), (1,)).double()
    strided(a.out_ptr, (a.rows, a.out_features), (a.out_features, 1)).copy_(total)


def _gguf_values(a: Any, rows: int) -> Tensor:
    """The values of rows of planes, fp32 [rows, in_features]."""
    from nanovllm.ops.packed_weights import GGUF_BLOCKS, PackedWeight, dequantize

    data = strided(a.data_ptr, (rows, a.row_bytes), (a.row_bytes, 1))
    size = GGUF_BLOCKS[a.SCHEME].group_size
    return dequantize(PackedWeight(a.SCHEME, data, None, None, size, a.in_features, planes=True))


def gguf(a: Any) -> None:
    sizes = (len(a.x_ptr), a.in_features)
    x = strided(a.x_ptr, sizes, (a.x_stride, 1)).double()
    y = strided(a.out_ptr, (a.rows, a.out_features), (a.out_stride, 1))
    weight = _gguf_values(a, max(1, a.num_experts) * a.out_features).double().unflatten(0, (-1, a.out_features))
    groups = _groups(a.ends_ptr[: a.num_experts].tolist()) if a.EXPERTS else [(0, 0, a.rows)]
    for expert, begin, end in groups:
        rows = x[a.rows_ptr[begin:end]] if a.HAS_ROWS else x[begin:end]
        total = rows @ weight[expert].t()
        if a.SPLITS > 1:
            parts = strided(
                a.parts_ptr, (a.SPLITS, a.rows, a.out_features), (a.rows * a.out_features, a.out_features, 1)
            )
            width = math.ceil(math.ceil(a.in_features / 256) / a.SPLITS) * 256
            for split in range(a.SPLITS):
                columns = slice(split * width, (split + 1) * width)
                parts[split] = rows[:, columns] @ weight[expert][:, columns].t()
        if a.HAS_BIAS:
            total += strided(a.bias_ptr, (a.out_features,), (1,), expert * a.out_features).double()
        y[begin:end] = total.to(y.dtype)


def gguf_values(a: Any) -> None:
    rows = a.rows_ptr[: a.num_rows] if a.HAS_ROWS else torch.arange(a.num_rows)
    values = _gguf_values(a, int(rows.max()) + 1)[rows]
    strided(a.out_ptr, (a.num_rows, a.in_features), (a.out_stride, 1)).copy_(values)


def sum_splits(a: Any) -> None:
    total = strided(a.parts_ptr, (a.SPLITS, a.elements), (a.elements, 1)).sum(0)
    if a.HAS_BIAS:
        total = (total.view(-1, a.out_features) + a.bias_ptr.float()).flatten()
    strided(a.out_ptr, (a.elements,), (1,)).copy_(total)


def dequantize(a: Any) -> None:
    scales, values = _packed_weight(a, a.GROUP_PARTS * a.BLOCK_K or a.in_features)
    strided(a.out_ptr, values.shape, (a.in_features, 1)).copy_((values * scales).float())


def _groups(ends: list[int]) -> Iterator[tuple[int, int, int]]:
    """(number, begin, end) of the groups that have rows."""
    for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end > begin:
            yield number, begin, end


def _of_expert(a: Any, expert: int, row_size: int, group_size: int) -> Tensor:
    """An expert's matrix in fp64: [outputs, inputs]."""
    rows = expert * a.out_features
    data = strided(a.data_ptr, (a.out_features, row_size), (row_size, 1), rows * row_size)
    if a.SCHEME == "dense":
        return data.double()
    sizes = (a.out_features, a.scale_columns)
    strides = (a.scale_columns, 1)
    scales = strided(a.scales_ptr, sizes, strides, rows * a.scale_columns)
    group = torch.arange(a.in_features) // group_size
    if a.SCHEME in ("int4", "mxfp4"):
        data = torch.stack((data & 15, data >> 4), -1).flatten(1)
    if a.SCHEME == "fp8":
        data = data.view(torch.float8_e4m3fn)
    if a.SCHEME == "mxfp4":
        data = E2M1[data.int()]
        scales = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
    values = data[:, : a.in_features].float()
    if a.HAS_ZEROS:
        values -= strided(a.zeros_ptr, sizes, strides, rows * a.scale_columns)[:, group].float()
    elif a.SCHEME == "int4":
        values -= 8
    return values.double() * scales[:, group].double()


def _grouped(a: Any, row_size: int, group_size: int) -> None:
    y = strided(a.y_ptr, (len(a.y_ptr), a.out_features), (a.out_features, 1))
    x = strided(a.x_ptr, (len(a.x_ptr), a.in_features), (a.x_stride, 1)).float().double()
    if a.FP8_INPUTS:
        scales = strided(a.x_scales_ptr, (len(x), a.scale_columns), (1, a.x_scale_stride))
        x *= scales[:, torch.arange(a.in_features) // group_size].double()
    for expert, begin, end in _groups(a.ends_ptr[: a.num_experts].tolist()):
        rows = x[a.rows_ptr[begin:end].long()] if a.HAS_ROWS else x[begin:end]
        total = rows @ _of_expert(a, expert, row_size, group_size).t()
        if a.HAS_BIAS:
            total += strided(a.bias_ptr, (a.out_features,), (1,), expert * a.out_features).double()
        y[begin:end] = total.to(y.dtype)


def grouped(a: Any) -> None:
    _grouped(a, a.row_size, a.group_size)


def packed_experts(a: Any) -> None:
    _grouped(a, a.row_bytes, a.GROUP_PARTS * a.BLOCK_K or a.in_features)


def weighted_sum(a: Any) -> None:
    rows = a.grid[0]
    each = a.EXPERTS + a.HAS_SHARED
    y = strided(a.y_ptr, (len(a.y_ptr), a.size), (a.size, 1))
    entries = strided(a.entries_ptr, (rows, a.EXPERTS), (a.EXPERTS, 1)).long()
    weights = strided(a.weights_ptr, (rows, each), (each, 1))
    total = torch.zeros(rows, a.size)
    for index in range(a.EXPERTS):
        total += weights[:, index : index + 1] * y[entries[:, index]].float()
    if a.HAS_SHARED:
        total += weights[:, a.EXPERTS :] * strided(a.shared_ptr, (rows, a.size), (a.size, 1)).float()
    strided(a.out_ptr, (rows, a.size), (a.size, 1)).copy_(total)


def _first_of_largest(scores: Tensor, count: int) -> Tensor:
    """The indices of the largest scores of each row, of equal ones the first; NaN is none."""
    scores = scores.nan_to_num(-math.inf, math.inf, -math.inf)
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _placed(a: Any, chosen: Tensor) -> None:
    """Write where the entries of all rows are: chosen [rows, K]."""
    experts, order = chosen.flatten().sort(stable=True)
    entries = len(order)
    ends = torch.searchsorted(experts, torch.arange(a.num_experts), right=True)
    strided(a.ends_ptr, (a.num_experts,), (1,)).copy_(ends)
    strided(a.order_ptr, (entries,), (1,)).copy_(order // a.K)
    strided(a.entries_ptr, (entries,), (1,)).copy_(order.argsort())


def route(a: Any) -> None:
    logits = strided(a.logits_ptr, (a.rows, a.num_experts), (a.logits_stride, 1)).float()
    scores = {"softmax": logits.softmax(1), "sigmoid": logits.sigmoid()}.get(a.SCORING, logits)
    choosing = scores + a.correction_ptr[: a.num_experts] if a.HAS_CORRECTION else scores
    if a.GROUPS > 1:
        grouped = choosing.unflatten(1, (a.GROUPS, -1))
        groups = _first_of_largest(grouped.topk(2, dim=2).values.sum(2), a.CHOSEN_GROUPS)
        hidden = torch.ones(a.rows, a.GROUPS, dtype=torch.bool).scatter_(1, groups, value=False)
        choosing = grouped.masked_fill(hidden[..., None], -math.inf).flatten(1)
    chosen = _first_of_largest(choosing, a.K)
    weights = scores.gather(1, chosen)
    if a.SCORING == "softmax_of_chosen":
        weights = weights.softmax(1)
    elif a.NORMALIZED:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    if a.HAS_EXPERT_SCALE:
        weights = weights * a.expert_scale_ptr[chosen].float()
    out = strided(a.weights_ptr, (a.rows, a.K + a.SHARED), (a.K + a.SHARED, 1))
    out[:, : a.K] = weights * a.weight_scale
    if a.SHARED:
        out[:, a.K] = a.share_ptr.flatten()[: a.rows].float().sigmoid() if a.HAS_GATE else 1.0
    if a.grid[0] == 1:
        _placed(a, chosen)
        return
    strided(a.chosen_ptr, (a.rows, a.K), (a.K, 1)).copy_(chosen)
    for program, part in enumerate(chosen.split(a.BLOCK_R)):
        counts = part.flatten().bincount(minlength=a.num_experts)
        strided(a.counts_ptr, (a.num_experts,), (1,), program * a.num_experts).copy_(counts)


def place(a: Any) -> None:
    _placed(a, strided(a.chosen_ptr, (a.rows, a.K), (a.K, 1)).long())


def _parts(a: Any) -> Iterator[tuple[int, list[int], Tensor, slice]]:
    """(part, its fields, the rows, their entries) of each adapter that changes the part of a layer."""
    parts = a.grid[2]
    table = strided(a.table_ptr, (a.num_slots, parts, 5), (a.slot_fields, 5, 1)).tolist()
    for slot, begin, end in _groups(a.ends_ptr[: a.num_slots].tolist()):
        for part, fields in enumerate(table[slot]):
            if fields[1]:
                yield part, fields, a.rows_ptr[begin:end], slice(begin, end)


def _low(a: Any) -> Tensor:
    sizes = (a.SPLITS, a.grid[2], a.entries, a.low_columns)
    return strided(a.low_ptr, sizes, (math.prod(sizes[1:]), math.prod(sizes[2:]), a.low_columns, 1))


def shrink(a: Any) -> None:
    low = _low(a)
    x = strided(a.x_ptr, (len(a.x_ptr), a.in_features), (a.x_stride, 1))
    each = math.ceil(math.ceil(a.in_features / a.BLOCK_K) / a.SPLITS) * a.BLOCK_K
    for part, (offset, rank, *_), rows, entries in _parts(a):
        matrix = strided(a.memory_ptr, (rank, a.in_features), (a.in_features, 1), offset).double()
        wide = x[rows].double()
        for split in range(a.SPLITS):
            columns = slice(split * each, (split + 1) * each)
            low[split, part, entries, :rank] = (wide[:, columns] @ matrix[:, columns].t()).float()


def expand(a: Any) -> None:
    low = _low(a).sum(0)
    for part, (_, rank, offset, first, end), rows, entries in _parts(a):
        matrix = strided(a.memory_ptr, (end - first, rank), (rank, 1), offset)
        added = low[part, entries, :rank].to(matrix.dtype).double() @ matrix.double().t()
        y = strided(a.y_ptr, (len(a.y_ptr), end - first), (a.y_stride, 1), first)
        y[rows] = (y[rows].float() + added.float()).to(y.dtype)


# ---- recurrent layers


def _runs(a: Any) -> Iterator[tuple[int, slice]]:
    """(slot, rows) of each run."""
    starts = a.starts_ptr[: len(a.slots_ptr) + 1].tolist()
    for slot, begin, end in zip(a.slots_ptr.tolist(), starts, starts[1:], strict=False):
        yield slot, slice(begin, end)


def _kept(a: Any, slot: int, channels: int, count: int) -> Tensor:
    """The last inputs of a slot's convolution: [channels, count]."""
    return strided(a.conv_ptr, (channels, count), (count, 1), slot * a.conv_stride)


def delta_inputs(a: Any) -> None:
    """In float64, since torch's functions give an element other last bits by how many there are beside it."""
    rows = a.rows
    kept = a.KERNEL - 1
    keys = 2 * a.key_heads * a.key_dim
    values = a.value_heads * a.value_dim
    x = strided(a.x_ptr, (rows, keys + values), (a.x_stride, 1))
    weight = strided(a.weight_ptr, (a.KERNEL, keys + values), (keys + values, 1)).double()
    total = torch.zeros(rows, keys + values, dtype=torch.float64)
    for slot, run in _runs(a):
        before = _kept(a, slot, keys + values, kept).t() if slot >= 0 else x.new_zeros(kept, keys + values)
        window = torch.cat((before, x[run])).double()
        for tap in range(a.KERNEL):
            total[run] += window[tap : tap + run.stop - run.start] * weight[tap]
    y = (total / (1.0 + torch.exp(-total))).to(x.dtype)
    strided(a.v_ptr, (rows, values), (values, 1)).copy_(y[:, keys:])
    strided(a.qk_ptr, (rows, keys), (keys, 1)).copy_(y[:, :keys])
    scale = torch.rsqrt(y[:, :keys].double().unflatten(1, (2 * a.key_heads, a.key_dim)).square().sum(-1) + a.eps)
    scale[:, : a.key_heads] /= math.sqrt(a.key_dim)
    strided(a.scale_ptr, scale.shape, (2 * a.key_heads, 1)).copy_(scale)
    sizes = (rows, a.value_heads)
    step = strided(a.a_ptr, sizes, (a.a_stride, 1)).double() + a.bias_ptr
    decay = torch.exp(-a.rate_ptr * torch.nn.functional.softplus(step))
    strided(a.decay_ptr, sizes, (a.value_heads, 1)).copy_(decay)
    share = torch.sigmoid(strided(a.b_ptr, sizes, (a.b_stride, 1)).double()).to(x.dtype)
    strided(a.beta_ptr, sizes, (a.value_heads, 1)).copy_(share)
    if a.ONE_ROW:
        _keep(a, x, keys + values, kept)


def keep(a: Any) -> None:
    _keep(a, strided(a.x_ptr, (len(a.x_ptr), a.channels), (a.x_stride, 1)), a.channels, a.KEPT)


def _keep(a: Any, x: Tensor, channels: int, count: int) -> None:
    """Keep the last `count` inputs of each run."""
    for slot, run in _runs(a):
        if slot < 0:
            continue
        kept = _kept(a, slot, channels, count)
        kept.copy_(torch.cat((kept.clone(), x[run].t()), dim=1)[:, run.stop - run.start :])


def recurrence(a: Any) -> None:
    runs = len(a.slots_ptr)
    for slot, begin, end in zip(
        a.slots_ptr.tolist(), a.begins_ptr[:runs].tolist(), a.ends_ptr[:runs].tolist(), strict=True
    ):
        q, k, v, decay, beta = (of_row.float() for of_row in _of_rows(a, slice(begin, end)))
        kept = _recurrent_state(a, max(slot, 0))
        state = kept.clone() if slot >= 0 else torch.zeros_like(kept)
        y = _columns(a, a.y_ptr, slice(begin, end))
        for row in range(end - begin):
            state *= decay[row][:, None, None]
            delta = beta[row][:, None] * (v[row] - torch.einsum("hkv,hk->hv", state, k[row]))
            state += k[row][..., None] * delta[:, None]
            y[row] = torch.einsum("hkv,hk->hv", state, q[row]).to(y.dtype)
        if slot >= 0:
            kept.copy_(state)


def _recurrent_state(a: Any, slot: int) -> Tensor:
    shape = (a.value_heads, a.key_dim, a.value_dim)
    return strided(a.states_ptr, shape, (a.key_dim * a.value_dim, a.value_dim, 1), slot * a.slot_stride)


def _columns(a: Any, memory: Tensor, rows: slice) -> Tensor:
    """[rows, value heads, value dim] of v or y."""
    strides = (a.value_heads * a.value_dim, a.value_dim, 1)
    return strided(memory, (rows.stop, a.value_heads, a.value_dim), strides)[rows]


def _keys(a: Any, rows: slice) -> tuple[Tensor, Tensor]:
    """q and k of rows for each value head, not yet scaled."""
    keys = a.key_heads * a.key_dim
    qk = strided(a.qk_ptr, (rows.stop, 2, a.key_heads, a.key_dim), (2 * keys, keys, a.key_dim, 1))[rows]
    q, k = qk.repeat_interleave(a.value_heads // a.key_heads, dim=2).double().unbind(1)
    return q, k


def _scales(a: Any, rows: slice) -> tuple[Tensor, Tensor]:
    """What they are to be multiplied by: [rows, value heads] each."""
    heads = a.key_heads
    scale = strided(a.scale_ptr, (rows.stop, 2, heads), (2 * heads, heads, 1))[rows]
    of_q, of_k = scale.repeat_interleave(a.value_heads // heads, dim=2).double().unbind(1)
    return of_q, of_k


def _shares(a: Any, rows: slice) -> tuple[Tensor, Tensor]:
    """decay and beta, [rows, value heads]."""
    sizes = (rows.stop, a.value_heads)
    decay, beta = (strided(each, sizes, (a.value_heads, 1))[rows].double() for each in (a.decay_ptr, a.beta_ptr))
    return decay, beta


def _of_rows(a: Any, rows: slice) -> tuple[Tensor, ...]:
    q, k = (each * scale[..., None] for each, scale in zip(_keys(a, rows), _scales(a, rows), strict=True))
    return (q, k, _columns(a, a.v_ptr, rows), *_shares(a, rows))


def _in_parts(a: Any, memory: Tensor, chunk: int) -> Tensor:
    """[value heads, parts, CHUNK, CHUNK] of T or M of a chunk."""
    sizes = (a.value_heads, a.PARTS, a.CHUNK, a.CHUNK)
    strides = (a.PARTS * a.CHUNK**2, a.CHUNK**2, a.CHUNK, 1)
    return strided(memory, sizes, strides, chunk * a.value_heads * a.PARTS * a.CHUNK**2)


def _store_parts(to: Tensor, x: Tensor) -> None:
    for part in to.unbind(1):
        part.copy_(x)
        x = x - part.double()


def _factors(a: Any, chunk: int) -> Tensor:
    """[FACTORS, value heads, CHUNK]."""
    size = a.FACTORS * a.CHUNK
    sizes = (a.FACTORS, a.value_heads, a.CHUNK)
    strides = (a.CHUNK, size, 1)
    return strided(a.factors_ptr, sizes, strides, chunk * a.value_heads * size)


def solve(a: Any) -> None:
    i = torch.arange(a.CHUNK)[:, None]
    j = torch.arange(a.CHUNK)
    for chunk in range(a.grid[1]):
        first = int(a.first_rows_ptr[a.first + chunk])
        rows = slice(first, first + a.CHUNK)
        q, k = (each.transpose(0, 1) for each in _keys(a, rows))  # [heads, rows, key dim]
        of_q, of_k = (scale.t() for scale in _scales(a, rows))  # [heads, rows]
        decay, beta = (share.t() for share in _shares(a, rows))
        between = torch.where(i > j, decay[..., None], 1.0).cumprod(1).tril()
        before = decay.cumprod(1)
        after = between[:, -1]
        _factors(a, chunk).copy_(torch.stack((before * of_k, before * of_q, after * of_k, before)))
        of_keys = between * of_k[:, None]
        _store_parts(_in_parts(a, a.mix_ptr, chunk), q @ k.mT * of_keys * of_q[..., None])
        lower = (k @ k.mT * of_keys * (of_k * beta)[..., None]).tril(-1)
        inverse = torch.linalg.solve_triangular(lower + torch.eye(a.CHUNK), torch.eye(a.CHUNK).double(), upper=False)
        _store_parts(_in_parts(a, a.solve_ptr, chunk), inverse * beta[:, None])


def advance(a: Any) -> None:
    runs = a.chunks_ptr[: len(a.slots_ptr) + 1].tolist()
    for slot, row, begin, end in zip(a.slots_ptr.tolist(), a.begins_ptr.tolist(), runs, runs[1:], strict=False):
        for chunk in range(max(begin, a.first), min(end, a.end)):
            first = row + (chunk - begin) * a.CHUNK
            rows = slice(first, first + a.CHUNK)
            state = _recurrent_state(a, slot)
            index = chunk - a.first
            of_k, of_q, after, before = _factors(a, index).double()[..., None]
            t, m = (_in_parts(a, each, index).double().sum(1) for each in (a.solve_ptr, a.mix_ptr))
            (q, k) = (each.transpose(0, 1) for each in _keys(a, rows))
            v = _columns(a, a.v_ptr, rows).transpose(0, 1)
            wide = state.double()
            written = t @ (v.double() - of_k * (k @ wide))
            _columns(a, a.y_ptr, rows).transpose(0, 1).copy_(of_q * (q @ wide) + m @ written)
            state.copy_(before[:, -1:] * wide + k.mT @ (after * written))


def gated_norm(a: Any) -> None:
    sizes = (a.pairs // a.heads, a.heads, a.size)
    x, z, y = (
        strided(each, sizes, (stride, a.size, 1))
        for each, stride in ((a.x_ptr, a.x_stride), (a.z_ptr, a.z_stride), (a.y_ptr, a.y_stride))
    )
    normed = (_normalised(x.float(), a.weight_ptr, a.size, a.eps) * a.weight_ptr.float()).to(x.dtype).float()
    y.copy_(normed * (z.float() * torch.sigmoid(z.float())))


# By the name of the kernel.
STAND_INS: dict[str, Callable[[Any], None]] = {
    "_gated_unit_kernel": gated_unit,
    "_norm_kernel": norm,
    "_heads_kernel": heads,
    "_draw_kernel": draw,
    "_store_kernel": store,
    "_quantize_kernel": quantize,
    "_round_inputs_kernel": round_inputs,
    "_prefill_kernel": prefill,
    "_decode_kernel": decode,
    "_reduce_kernel": reduce,
    "_merge_kernel": merge,
    "_merge_segments_kernel": merge_segments,
    "_gather_kernel": gather,
    "_packed_kernel": packed,
    "_few_rows_kernel": few_rows,
    "_gguf_kernel": gguf,
    "_gguf_values_kernel": gguf_values,
    "_sum_splits_kernel": sum_splits,
    "_dequantize_kernel": dequantize,
    "_grouped_kernel": grouped,
    "_packed_experts_kernel": packed_experts,
    "_route_kernel": route,
    "_place_kernel": place,
    "_weighted_sum_kernel": weighted_sum,
    "_shrink_kernel": shrink,
    "_expand_kernel": expand,
    "_inputs_kernel": delta_inputs,
    "_keep_kernel": keep,
    "_recurrence_kernel": recurrence,
    "_solve_kernel": solve,
    "_advance_kernel": advance,
    "_gated_norm_kernel": gated_norm,
}
