"""vLLM's offline engine with its defaults. Its worker is a separate process with its own OpenMP settings."""

from __future__ import annotations

import os

from benchmarks.peers.runner import Emit, Job, Loaded, run

GIB = 1 << 30


def variables(job: Job) -> dict[str, str]:
    """Settings that vLLM reads at import: one thread per available core, and memory for the prompt's KV."""
    cores = sorted(os.sched_getaffinity(0))[: job.threads]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(job.kv_bytes * 9 // 8 // GIB + 1),
    }


def load(job: Job) -> Loaded:
    os.environ.update(variables(job))
    import vllm
    from vllm import LLM, SamplingParams

    settings = {
        "dtype": job.dtype,
        "max_model_len": job.max_len,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
    }
    engine = LLM(model=job.model, **settings).llm_engine

    def generate(prompt: list[int], output_len: int, emit: Emit) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        engine.add_request("0", {"prompt_token_ids": prompt}, params)
        known = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = output.outputs[0].token_ids
                for token in tokens[known:]:
                    emit(token)
                known = len(tokens)

    return Loaded(vllm.__version__, settings | variables(job), generate)


if __name__ == "__main__":
    run(load)
