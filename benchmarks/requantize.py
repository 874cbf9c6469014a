"""Perplexity of a GGUF model in other types: each matrix is dequantized, quantized again and written to a new file.

    python -m benchmarks.requantize FILE.gguf [--types Q8_0 Q4_K] [--tokens 4000] [--transformers]

The text is the beginning of "Alice's Adventures in Wonderland". `--transformers` also computes each perplexity with
Transformers in float32, on the weights that the package gguf dequantizes. Matrices whose rows a type's blocks do not
divide keep their type. Q4_K is quantized to the nearest of plain scales, without llama.cpp's search for better ones.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.gguf_types import TYPES, quantize
from benchmarks.options import Parser, positive
from nanovllm import LLM, SamplingParams
from nanovllm.apps.smollm2.reading import story

NAME = "python -m benchmarks.requantize"
ROWS = 256  # of logits at once, in Transformers


def requantize(source: Path, target: Path, kind: str) -> Counter[str]:
    """Write the file with its matrices in another type. Returns how many matrices have which type."""
    import gguf
    from gguf.quants import dequantize

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    wanted, counts = gguf.GGMLQuantizationType[kind], Counter[str]()
    for tensor in reader.tensors:
        data, type_ = np.array(tensor.data), tensor.tensor_type
        if len(tensor.shape) == 2 and tensor.shape[0] % gguf.GGML_QUANT_SIZES[wanted][0] == 0:
            data, type_ = quantize(dequantize(tensor.data, type_), kind), wanted
        if len(tensor.shape) == 2:
            counts[type_.name] += 1
        writer.add_tensor(tensor.name, data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return counts


def perplexity(path: Path, num_tokens: int, dtype: str) -> tuple[float, int]:
    """Perplexity of the engine on the text's first tokens, and the bytes of the weights in memory."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with LLM(path, dtype=dtype, max_model_len=num_tokens + 1, max_num_batched_tokens=1024) as llm:
        tokens = llm.get_tokenizer().encode(story())[:num_tokens]
        (output,) = llm.generate([tokens], params, use_tqdm=False)
        weight_bytes = llm.engine.executor.model.weight_bytes
    assert output.prompt_logprobs is not None
    rows = zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
    logprobs = [row[token].logprob for row, token in rows if row is not None]
    return math.exp(-math.fsum(logprobs) / len(logprobs)), weight_bytes


def transformers_perplexity(path: Path, num_tokens: int) -> float:
    """The same of Transformers in float32, with its own reader of the file."""
    import torch
    from transformers import AutoModelForCausalLM

    from nanovllm.formats.gguf.tokenizer import load_tokenizer

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokens = torch.tensor(load_tokenizer(path).encode(story())[:num_tokens])
    with torch.inference_mode():
        hidden = model.model(tokens[None]).last_hidden_state[0, :-1]
        losses = [
            torch.nn.functional.cross_entropy(model.lm_head(rows).double(), wanted, reduction="sum").item()
            for rows, wanted in zip(hidden.split(ROWS), tokens[1:].split(ROWS), strict=True)
        ]
    return math.exp(math.fsum(losses) / len(hidden))


def measure(path: Path, counts: Counter[str] | None, args: argparse.Namespace) -> None:
    """Print a line about a file."""
    types = "as it is" if counts is None else ", ".join(f"{n} x {name}" for name, n in counts.most_common())
    for dtype in args.dtypes:
        found, weight_bytes = perplexity(path, args.tokens, dtype)
        size = path.stat().st_size
        print(
            f"{types:<28} {dtype:<9} perplexity {found:.4f}, weights {weight_bytes:,} bytes, {weight_bytes / size:.3f} "
            "of the file",
            flush=True,
        )
    if args.transformers:
        print(f"{types:<28} Transformers, float32: perplexity {transformers_perplexity(path, args.tokens):.4f}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog=NAME, description="Perplexity of a GGUF model in other types.")
    add = parser.add_argument
    add("model", type=Path, help="a GGUF file")
    add("--types", nargs="*", choices=TYPES, default=["Q8_0", "Q4_K"], help="to write (default: %(default)s)")
    add("--tokens", type=positive, default=4000, help="of the text (default: %(default)s)")
    add("--dtypes", nargs="+", default=["float32"], help="to compute in (default: %(default)s)")
    add("--transformers", action="store_true", help="compute each perplexity with Transformers too")
    return parser.run(argv, run)


def run(args: argparse.Namespace) -> int:
    measure(args.model, None, args)
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.types:
            target = Path(folder) / f"{args.model.stem}-{kind}.gguf"
            measure(target, requantize(args.model, target, kind), args)
            target.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
