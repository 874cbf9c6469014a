"""Greedy decode by llama.cpp's Python bindings, with their prompt lookup and without. Arguments: GGUF file, settings.

Runs in llama.cpp's environment. Each line of stdin is a request {"prompt": token ids, "tokens": most of the answer,
"drafts": whether to look up}; the answer is a line [token ids, seconds from the first token to the last]. An answer
ends early with the model's end token.
"""

from __future__ import annotations

import json
import sys
import time


def main(gguf: str, settings: dict[str, int]) -> None:
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    lookup = LlamaPromptLookupDecoding(settings["ngram"], settings["drafts"])
    threads = {"n_threads": settings["threads"], "n_threads_batch": settings["threads"]}
    sizes = {"n_ctx": settings["max_len"], "n_batch": 2048, "n_ubatch": 512, "flash_attn": False}
    engines = [
        llama_cpp.Llama(model_path=gguf, verbose=False, draft_model=draft_model, logits_all=keeps, **threads, **sizes)
        for draft_model, keeps in ((None, False), (lookup, True))  # without it drafts after 2,048 tokens are refused
    ]
    for line in sys.stdin:
        request = json.loads(line)
        llm = engines[int(request["drafts"])]
        llm.reset()  # otherwise it searches its cache for a prefix of the prompt
        tokens: list[int] = []
        begin = 0.0
        for token in llm.generate(request["prompt"], temp=0.0, repeat_penalty=1.0):
            begin = begin or time.perf_counter()
            tokens.append(int(token))
            if token == llm.token_eos() or len(tokens) == request["tokens"]:
                break
        print(json.dumps([tokens, time.perf_counter() - begin]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
