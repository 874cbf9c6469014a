"""Perplexity of a GGUF model in other types: each matrix is dequantized, quantized again and written to a new file.

    python -m benchmarks.requantize FILE.gguf [--types Q8_0 Q4_K] [--tokens 4000] [--transformers] [--llama-cpp PYTHON]

The text is the beginning of "Alice's Adventures in Wonderland". `--transformers` also computes each perplexity with
Transformers in float32, on the weights that the package gguf dequantizes; `--llama-cpp` names a Python in whose
environment llama-cpp-python is, and computes it with llama.cpp. `--types` without any measures the file alone. Matrices
whose rows a type's blocks do not divide keep their type. Q4_K is quantized to the nearest of plain scales, without
llama.cpp's search for better ones.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gguf_types import TYPES, quantize
from benchmarks.options import Parser, add_json_option, positive
from benchmarks.peers.llama_cpp_perplexity import llama_cpp_measures
from benchmarks.report import machine_facts, write_json
from nanovllm import LLM, SamplingParams
from nanovllm.apps.real_models.reading import story

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
    wanted = gguf.GGMLQuantizationType[kind]
    counts = Counter[str]()
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        type_ = tensor.tensor_type
        if len(tensor.shape) == 2 and tensor.shape[0] % gguf.GGML_QUANT_SIZES[wanted][0] == 0:
            data = quantize(dequantize(tensor.data, type_), kind)
            type_ = wanted
        if len(tensor.shape) == 2:
            counts[type_.name] += 1
        writer.add_tensor(tensor.name, data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return counts


def text_tokens(path: Path, num_tokens: int) -> list[int]:
    """The text's first tokens."""
    from nanovllm.text.tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(path).encode(story())[:num_tokens]


def perplexity(path: Path, num_tokens: int, dtype: str) -> tuple[float, int]:
    """Perplexity of the engine on the text's first tokens, and the bytes of the weights in memory."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with LLM(path, dtype=dtype, max_model_len=num_tokens + 1, max_num_batched_tokens=1024) as llm:
        tokens = llm.get_tokenizer().encode(story())[:num_tokens]
        (output,) = llm.generate([tokens], params, use_tqdm=False)
        weight_bytes = llm.engine.executor.model.network.weight_bytes  # type: ignore[attr-defined]  # of one rank
    assert output.prompt_logprobs is not None
    rows = zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
    logprobs = [row[token].logprob for row, token in rows if row is not None]
    return math.exp(-math.fsum(logprobs) / len(logprobs)), weight_bytes


def transformers_perplexity(path: Path, num_tokens: int) -> float:
    """The same of Transformers in float32, with its own reader of the file."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokens = torch.tensor(text_tokens(path, num_tokens))
    with torch.inference_mode():
        hidden = model.model(tokens[None]).last_hidden_state[0, :-1]
        losses = [
            torch.nn.functional.cross_entropy(model.lm_head(rows).double(), wanted, reduction="sum").item()
            for rows, wanted in zip(hidden.split(ROWS), tokens[1:].split(ROWS), strict=True)
        ]
    return math.exp(math.fsum(losses) / len(hidden))


def measure(path: Path, counts: Counter[str] | None, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a line for each perplexity of a file, and return them."""
    types = "as it is" if counts is None else ", ".join(f"{n} x {name}" for name, n in counts.most_common())
    rows: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        value, weight_bytes = perplexity(path, args.tokens, dtype)
        share = weight_bytes / path.stat().st_size
        note = f", weights {weight_bytes:,} bytes, {share:.3f} of the file"
        rows.append({"engine": "nanovllm", "dtype": dtype, "perplexity": value, "weight_bytes": weight_bytes})
        print(f"{types:<28} nanovllm, {dtype}: perplexity {value:.4f}{note}", flush=True)
    if args.transformers:
        value = transformers_perplexity(path, args.tokens)
        rows.append({"engine": "Transformers", "dtype": "float32", "perplexity": value})
        print(f"{types:<28} Transformers, float32: perplexity {value:.4f}", flush=True)
    if args.llama_cpp is not None:
        job = {"gguf": str(path), "tokens": text_tokens(path, args.tokens), "texts": [], "threads": args.threads}
        its = llama_cpp_measures(args.llama_cpp, job)
        rows.append({"engine": f"llama-cpp-python {its['version']}", "perplexity": its["perplexity"]})
        print(f"{types:<28} llama.cpp: perplexity {its['perplexity']:.4f}", flush=True)
    return [{"types": types, "file_bytes": path.stat().st_size, **row} for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog=NAME, description="Perplexity of a GGUF model in other types.")
    add = parser.add_argument
    add("model", type=Path, help="a GGUF file")
    add("--types", nargs="*", choices=TYPES, default=["Q8_0", "Q4_K"], help="to write (default: %(default)s)")
    add("--tokens", type=positive, default=4000, help="of the text (default: %(default)s)")
    add("--dtypes", nargs="+", default=["float32"], help="to compute in (default: %(default)s)")
    add("--transformers", action="store_true", help="compute each perplexity with Transformers too")
    add("--llama-cpp", type=Path, metavar="PYTHON", help="compute each perplexity with this Python's llama_cpp too")
    add("--threads", type=positive, default=2, help="of llama.cpp (default: %(default)s)")
    add_json_option(parser)
    return parser.run(argv, run)


def run(args: argparse.Namespace) -> int:
    results = measure(args.model, None, args)
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.types:
            target = Path(folder) / f"{args.model.stem}-{kind}.gguf"
            results += measure(target, requantize(args.model, target, kind), args)
            target.unlink()
    write_json(args.output_json, args, machine_facts("cpu"), results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
