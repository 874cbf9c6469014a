"""nanovllm, with a KV cache of the size that the prompt needs."""

from __future__ import annotations

from benchmarks.peers.runner import Emit, Job, Loaded, run

BLOCK = 256


def load(job: Job) -> Loaded:
    import nanovllm
    from nanovllm import LLM, SamplingParams

    blocks = -(-job.max_len // BLOCK)
    settings = {
        "device": "cpu",
        "max_model_len": job.max_len,
        "max_num_seqs": 1,
        "kvcache_block_size": BLOCK,
        "num_gpu_blocks": max(4, blocks + blocks // 50 + 1),  # the block manager keeps 1% free
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,  # prompts are token ids
    }
    llm = LLM(job.model, **settings)

    def generate(prompt: list[int], output_len: int, emit: Emit) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        llm.engine.add_request("0", None, params, prompt_token_ids=prompt)
        known = 0
        finished = False
        while not finished:
            for output in llm.engine.step():
                tokens = output.outputs[0].token_ids
                finished = output.finished
                for token in tokens[known:]:
                    emit(token)
                known = len(tokens)

    return Loaded(nanovllm.__version__, settings, generate)


if __name__ == "__main__":
    run(load)
