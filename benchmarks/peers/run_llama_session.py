"""Turns of a session by llama.cpp's Python bindings, with their prefix cache. Arguments: GGUF file, settings.

Runs in llama.cpp's environment. Each line of stdin is a request {"prompt": token ids, "tokens": of the answer, "fresh":
whether to forget all prompts before}; the answer is a line [token ids, seconds to the first token].
"""

from __future__ import annotations

import json
import sys
import time


def main(gguf: str, settings: dict[str, int]) -> None:
    import llama_cpp

    threads = {"n_threads": settings["threads"], "n_threads_batch": settings["threads"]}
    sizes = {"n_ctx": settings["max_len"], "n_batch": 2048, "n_ubatch": 512, "flash_attn": False}
    llm = llama_cpp.Llama(model_path=gguf, verbose=False, **threads, **sizes)
    for line in sys.stdin:
        request = json.loads(line)
        if request["fresh"]:
            llm.reset()
        tokens: list[int] = []
        first = 0.0
        begin = time.perf_counter()
        for token in llm.generate(request["prompt"], temp=0.0, repeat_penalty=1.0):
            first = first or time.perf_counter() - begin
            tokens.append(int(token))
            if len(tokens) == request["tokens"]:
                break
        print(json.dumps([tokens, first]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
