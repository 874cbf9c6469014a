"""SmolLM2-135M-Instruct against Transformers on 3,000 tokens: greedy tokens and perplexity, resident and offloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import offloaded
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.apps.real_models.reading import BLOCK_SIZE, DEVICE_BLOCKS, QUESTIONS, story

pytestmark = pytest.mark.slow

MAX_TOKENS = 48
ROWS = 512  # of logits at once: all of them would be more than a gigabyte
TOSS = 1e-3  # two logits nearer than this may change order with the order of a sum
# torch's float32 softmax, which the engine uses, sums 49,152 tokens to a little too little: all log-probabilities come
# out some 8e-6 too high, which the mean shows.
MEAN_TOLERANCE = 1e-5
TOKEN_TOLERANCE = 1e-3
MAX_MODEL_LEN = 28 * BLOCK_SIZE
NUM_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE
MESSAGES = [{"role": "user", "content": f"{story()[:12_500]}\n\nQuestion: {QUESTIONS[0][0]} Answer briefly."}]
ENGINES: dict[str, dict[str, Any]] = {
    "resident": {"kvcache_block_size": BLOCK_SIZE, "num_gpu_blocks": NUM_BLOCKS},
    "offloaded": offloaded(BLOCK_SIZE, DEVICE_BLOCKS, NUM_BLOCKS),
}


@dataclass(frozen=True)
class Reference:
    """What Transformers computes in float32."""

    prompt: list[int]
    logprobs: Tensor  # of the prompt's tokens but the first, float64
    tokens: list[int]  # greedy, up to the first that last bits could change


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Reference:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    with torch.inference_mode():
        output = model.model(torch.tensor([prompt]), use_cache=True)
        hidden = output.last_hidden_state[0]
        logprobs = [
            _token_logprobs(model.lm_head(hidden[start : start + ROWS]), prompt[start + 1 : start + 1 + ROWS])
            for start in range(0, len(prompt) - 1, ROWS)
        ]
        tokens = _greedy(model, hidden[-1:], output.past_key_values)
    return Reference(prompt, torch.cat(logprobs), tokens)


def _token_logprobs(logits: Tensor, tokens: list[int]) -> Tensor:
    """Log-probabilities [len(tokens)] of `tokens` in the first rows of logits [rows, vocab], in float64."""
    logits = logits[: len(tokens)].double()
    return logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]


def _greedy(model: Any, hidden: Tensor, past: Any) -> list[int]:
    """The most likely tokens, at most MAX_TOKENS; ends before one whose runner-up is as likely but for last bits."""
    tokens: list[int] = []
    while len(tokens) < MAX_TOKENS:
        best = model.lm_head(hidden)[0].topk(2)
        if best.values[0] - best.values[1] < TOSS:
            break
        tokens.append(int(best.indices[0]))
        hidden = model.model(best.indices[None, :1], past_key_values=past, use_cache=True).last_hidden_state[0]
    return tokens


@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_and_perplexity_equal_transformers(engine: str, smollm2_dir: Path, reference: Reference) -> None:
    assert len(reference.prompt) >= 3000 and len(reference.tokens) >= 16
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, prompt_logprobs=0)
    with LLM(smollm2_dir, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=1024, **ENGINES[engine]) as llm:
        (output,) = llm.chat(MESSAGES, params, use_tqdm=False)
        moved = llm.kv_stats().transfers
    assert output.prompt_token_ids == reference.prompt
    found = output.outputs[0].token_ids[: len(reference.tokens)]
    assert found == reference.tokens
    rows = zip(output.prompt_logprobs[1:], reference.prompt[1:], strict=True)
    logprobs = torch.tensor([row[token].logprob for row, token in rows], dtype=torch.float64)
    torch.testing.assert_close(logprobs, reference.logprobs, rtol=0, atol=TOKEN_TOLERANCE)
    assert logprobs.mean().item() == pytest.approx(reference.logprobs.mean().item(), rel=MEAN_TOLERANCE)
    assert (moved.d2h_copies > 0) == (moved.cpu_attention_blocks > 0) == (engine == "offloaded")
