"""llama.cpp's perplexity on given tokens, and its tokens of given texts: JSON from stdin, JSON to stdout.

Runs in llama.cpp's environment and needs llama_cpp and numpy. The KV cache is F16, as is its default. llama.cpp keeps
the logits of all tokens, 4 bytes for each token of the vocabulary.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

BATCH = 512


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """job: gguf, the file; tokens: at least two; texts: to tokenize, special tokens in them too; threads."""
    import llama_cpp
    import numpy as np

    tokens = job["tokens"]
    threads = job["threads"]
    settings = {"n_ctx": len(tokens), "n_batch": BATCH, "n_threads": threads, "n_threads_batch": threads}
    llm = llama_cpp.Llama(model_path=job["gguf"], logits_all=True, flash_attn=False, verbose=False, **settings)
    llm.eval(tokens)
    losses = []
    for logits, token in zip(llm.scores[: len(tokens) - 1], tokens[1:], strict=True):
        wide = logits.astype(np.float64)
        highest = wide.max()
        losses.append(highest + math.log(np.exp(wide - highest).sum()) - wide[token])
    return {
        "version": llama_cpp.__version__,
        "perplexity": math.exp(math.fsum(losses) / len(losses)),
        "texts": [llm.tokenize(text.encode(), add_bos=True, special=True) for text in job["texts"]],
    }


def llama_cpp_measures(python: str | Path, job: dict[str, Any]) -> dict[str, Any]:
    """`measure` in a process of `python`. Raises RuntimeError with its last line."""
    done = subprocess.run([python, __file__], input=json.dumps(job), capture_output=True, text=True)
    if done.returncode:
        *_, last = done.stderr.strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"{python} cannot measure llama.cpp: {last}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    print(json.dumps(measure(json.load(sys.stdin))))
