"""Transformers' generate, with the attention and the cache that it chooses by itself."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.runner import Emit, Job, Loaded, run


class _Stream:
    """What generate hands its tokens to: first the prompt, then one token after the other."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._seen_prompt = False

    def put(self, tokens: Any) -> None:
        if self._seen_prompt:
            self._emit(int(tokens))
        self._seen_prompt = True

    def end(self) -> None:
        """Nothing is held back."""


def load(job: Job) -> Loaded:
    import torch
    import transformers

    torch.set_num_threads(job.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype="auto", trust_remote_code=False).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(prompt: list[int], output_len: int, emit: Emit) -> None:
        ids = torch.tensor([prompt])
        length = {"max_new_tokens": output_len, "min_new_tokens": output_len}
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, do_sample=False, streamer=_Stream(emit), **length)

    settings = {"attention": model.config._attn_implementation, "dtype": str(model.dtype)}
    return Loaded(transformers.__version__, settings, generate)


if __name__ == "__main__":
    run(load)
