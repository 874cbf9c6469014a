"""Prompt lookup of other engines, for `benchmarks.speculation`: greedy answers to one prompt, with it and without."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.process import asking, command

# A prompt, the most tokens of its answer, and whether to draft give the answer's tokens and the seconds of its decode.
Lookup = Callable[[str, int, bool], tuple[list[int], float]]


def transformers_lookup(model_path: str, drafts: int) -> Lookup:
    """Transformers prefills in every turn: the time of one token is taken off."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto")

    def generate(prompt: str, tokens: int, **how: Any) -> tuple[list[int], float]:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        ones = torch.ones_like(ids)
        begin = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=ones, max_new_tokens=tokens, do_sample=False, **how)
        return out[0, ids.shape[1] :].tolist(), time.perf_counter() - begin

    def answer(prompt: str, tokens: int, is_drafting: bool) -> tuple[list[int], float]:
        _, prefill = generate(prompt, 1)
        generated, seconds = generate(prompt, tokens, **({"prompt_lookup_num_tokens": drafts} if is_drafting else {}))
        return generated, seconds - prefill

    return answer


@contextmanager
def llama_cpp_lookup(python: Path, gguf: Path, model_path: str, settings: dict[str, int]) -> Iterator[Lookup]:
    """llama.cpp through its Python bindings and their lookup, in a process of `python`, whose environment has them.

    settings: as `benchmarks.peers.run_llama_lookup` takes them.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    arguments = command(python, "benchmarks.peers.run_llama_lookup", str(gguf), json.dumps(settings))
    with asking("llama.cpp", arguments) as ask:

        def answer(prompt: str, tokens: int, is_drafting: bool) -> tuple[list[int], float]:
            generated, seconds = ask({"prompt": tokenizer(prompt).input_ids, "tokens": tokens, "drafts": is_drafting})
            return generated, seconds

        yield answer
