"""Writes a quantized checkpoint from one in plain numbers, rounding each weight to the nearest value.

    python -m benchmarks.quantize_checkpoint MODEL DIRECTORY --format gptq [--bits 4] [--group-size 128] [--asymmetric]
                                             [--perplexity 4000]

Formats: gptq, gptq_v2, awq, pack-quantized, float-quantized, fp8 (blocks of 128 x 128), fp8-channel, fp8-tensor. The
projections of all layers are quantized; embedding, output projection, norms and biases keep their values. Rounding to
the nearest is the plainest of all methods: a checkpoint made with calibration has a lower perplexity. `--perplexity`
prints that of the new checkpoint on the first tokens of the text that `benchmarks.requantize` uses.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.options import Parser, positive
from benchmarks.requantize import perplexity

FORMATS = (
    "gptq", "gptq_v2", "awq", "pack-quantized", "float-quantized", "fp8", "fp8-channel", "fp8-tensor",
)  # fmt: skip
PROJECTION = re.compile(
    r"(model\.(?:language_model\.)?(?:layers\.\d+\.(?:(?:self_attn|mlp(?:\.experts\.\d+|\.shared_experts?)?)\.\w+_proj"
    r"|block_sparse_moe\.experts\.\d+\.w[123]|linear_attn\.(?:in_proj_qkvz?|in_proj_z|out_proj)"
    r"|experts\.\d+\.\w+_proj|per_layer_input_gate|per_layer_projection)|per_layer_model_projection))\.weight"
)
SMALL = re.compile(r"(.+\.linear_attn\.in_proj_(?:b|a|ba))\.weight")  # a few rows, which quantizers leave as they are
BLOCK = 128
FP8_MAX = 448.0


def quantize_checkpoint(
    model: Path, directory: Path, format: str, bits: int = 4, group_size: int = 128, symmetric: bool = True
) -> None:
    """Write `model`, a directory with safetensors in one file, in `format` to `directory`, with its other files."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, directory / file.name)
    config = json.loads((model / "config.json").read_text())
    stored = dict(_single_experts(load_file(model / "model.safetensors")))
    plain = [match[1] for match in map(SMALL.fullmatch, stored) if match is not None]
    config["quantization_config"] = quantization_config(format, bits, group_size, symmetric, plain)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        projection = PROJECTION.fullmatch(name)
        if projection is None:
            tensors[name] = tensor
        else:
            tensors |= {
                f"{projection[1]}.{suffix}": part.contiguous()
                for suffix, part in quantized(tensor.float(), format, bits, group_size, symmetric)
            }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _single_experts(stored: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors with one for each projection of an expert, as quantizers write Gemma 4, where one holds them all."""
    for name, tensor in stored.items():
        prefix, separator, projection = name.rpartition(".experts.")
        if not separator or projection not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        names = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
        for index, expert in enumerate(tensor):
            for own, part in zip(names, expert.chunk(len(names)), strict=True):
                yield f"{prefix}.experts.{index}.{own}.weight", part


def quantization_config(
    format: str, bits: int, group_size: int, symmetric: bool, plain: Sequence[str] = ()
) -> dict[str, Any]:
    """The config of the format, with the fields that its usual tools write.

    plain: modules of layers that keep their values.
    """
    if format.startswith("gptq"):
        config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": False, "sym": symmetric}
        config |= {"checkpoint_format": format, "damp_percent": 0.01, "true_sequential": True, "lm_head": False}
        return config | ({"dynamic": {f"-:{re.escape(name)}$": {} for name in plain}} if plain else {})
    if format == "awq":
        config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True}
        return config | {"version": "gemm", "modules_to_not_convert": list(plain) or None}
    if format.startswith("fp8"):
        if format == "fp8":
            size = [BLOCK, BLOCK]
            config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": size}
            return config | ({"modules_to_not_convert": list(plain)} if plain else {})
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head", *plain]}
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    inputs: dict[str, Any] | None = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    if format == "pack-quantized":
        strategy = "channel" if group_size == -1 else "group"
        weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric, "actorder": None}
        weights["group_size"] = None if group_size == -1 else group_size
        inputs = None
    group = {"targets": ["Linear"], "weights": {**weights, "dynamic": False}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None}}, "ignore": ["lm_head", *plain],
        "kv_cache_scheme": None, "global_compression_ratio": None,
    }  # fmt: skip


def quantized(weight: Tensor, format: str, bits: int, group_size: int, symmetric: bool) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one projection, fp32 [out, in], by the last part of their names."""
    if format in ("fp8", "fp8-channel", "fp8-tensor", "float-quantized"):
        tile = {"fp8": (BLOCK, BLOCK), "fp8-tensor": tuple(weight.shape)}.get(format, (1, weight.shape[1]))
        values, scales = rounded_to_fp8(weight, *tile)
        yield "weight", values
        yield ("weight_scale_inv", scales) if format == "fp8" else ("weight_scale", scales)
        return
    in_features = weight.shape[1]
    size = in_features if group_size == -1 else min(group_size, in_features)
    scales, zeros = fitted_groups(weight, bits, size, symmetric and format != "awq")
    columns = torch.arange(in_features) // size
    q = (torch.round(weight / scales[:, columns].float()) + zeros[:, columns]).clamp(0, 2**bits - 1).int()
    if format == "pack-quantized":
        yield "weight_packed", packed(q, bits)
        yield "weight_scale", scales
        yield "weight_shape", torch.tensor(weight.shape)
        if not symmetric:
            yield "weight_zero_point", packed(zeros.T, bits).T
        return
    yield "scales", scales.T
    if format == "awq":
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
        yield "qweight", packed(q.T.unflatten(-1, (-1, 8))[..., order].flatten(-2), 4)
        yield "qzeros", packed(zeros.T.unflatten(-1, (-1, 8))[..., order].flatten(-2), 4)
        return
    yield "qweight", packed(q, bits).T
    yield "qzeros", packed((zeros.T - int(format == "gptq")) % 2**bits, bits)
    yield "g_idx", columns.int()


def fitted_groups(weight: Tensor, bits: int, size: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """float16 scales and integer zero points [out, groups], so that a group's values fill the range of the integers."""
    groups = torch.nn.functional.pad(weight, (0, -weight.shape[1] % size)).unflatten(-1, (-1, size))
    low = groups.amin(-1).clamp(max=0)
    high = groups.amax(-1).clamp(min=0)
    if symmetric:
        low, high = -torch.maximum(-low, high), torch.maximum(-low, high)
    scales = ((high - low) / (2**bits - 1)).clamp(min=1e-6).half()
    if symmetric:
        return scales, torch.full_like(low, 2 ** (bits - 1)).int()
    return scales, torch.round(-low / scales.float()).clamp(0, 2**bits - 1).int()


def rounded_to_fp8(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn [out, in], and fp32 scales for blocks of rows x columns: [blocks, blocks]."""
    out_features, in_features = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -in_features % columns, 0, -out_features % rows))
    blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))  # [blocks, rows, blocks, columns]
    scales = (blocks.abs().amax((1, 3)) / FP8_MAX).clamp(min=1e-12)
    values = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:out_features, :in_features]
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales


def packed(values: Tensor, bits: int) -> Tensor:
    """Unsigned integers [rows, n] in int32 [rows, n * bits / 32], the first in the lowest bits."""
    count = 32 // bits
    words = (values.long().unflatten(-1, (-1, count)) << (torch.arange(count) * bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def run(args: argparse.Namespace) -> int:
    quantize_checkpoint(args.model, args.directory, args.format, args.bits, args.group_size, not args.asymmetric)
    if args.perplexity is not None:
        value, weight_bytes = perplexity(args.directory, args.perplexity, "auto")
        print(f"{args.directory}: perplexity {value:.4f}, weights {weight_bytes:,} bytes")
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="quantize_checkpoint", description=str(__doc__).partition("\n")[0])
    parser.add_argument("model", type=Path, help="directory of a checkpoint with model.safetensors")
    parser.add_argument("directory", type=Path, help="where to write")
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4, help="of gptq and pack-quantized (default: 4)")
    parser.add_argument("--group-size", type=int, default=128, help="inputs with one scale, -1 for all (default: 128)")
    parser.add_argument("--asymmetric", action="store_true", help="with zero points")
    parser.add_argument("--perplexity", type=positive, metavar="TOKENS", help="measure it on so many tokens")
    return parser.run(arguments, run)


if __name__ == "__main__":
    raise SystemExit(main())
