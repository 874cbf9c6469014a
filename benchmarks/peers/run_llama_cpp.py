"""llama.cpp through its Python bindings: F16 KV cache, and no flash attention, which slows it on CPUs."""

from __future__ import annotations

from benchmarks.peers.runner import Emit, Job, Loaded, run


def load(job: Job) -> Loaded:
    import llama_cpp

    settings = {
        "n_ctx": job.max_len,
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_threads": job.threads,
        "n_threads_batch": job.threads,
        "flash_attn": False,
    }
    if job.gguf is None:
        raise RuntimeError("llama.cpp needs the weights as GGUF")
    llm = llama_cpp.Llama(model_path=job.gguf, verbose=False, **settings)

    def generate(prompt: list[int], output_len: int, emit: Emit) -> None:
        llm.reset()  # otherwise it searches its cache for a prefix of the prompt
        tokens = llm.generate(prompt, temp=0.0, repeat_penalty=1.0)
        for _ in range(output_len):
            emit(next(tokens))

    return Loaded(llama_cpp.__version__, settings, generate)


if __name__ == "__main__":
    run(load)
