"""A real model answers questions about a real text, with most of its KV cache on the host.

The text is the first two chapters of "Alice's Adventures in Wonderland" by Lewis Carroll, 1865, in the public domain:
Project Gutenberg's Millennium Fulcrum Edition 2.9, from alice29.txt, a file that compressors are tested with.

A model of 135 million parameters answers few questions about so long a text. These are ones that it answers, found by
trying some thirty; it has the answers from the text, most of which is on the host by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.kvcache.base import KVStats

TITLE = "the first two chapters of Alice's Adventures in Wonderland"
# Each with words that a right answer contains, in small letters.
QUESTIONS = (
    ("What did the label on the bottle say?", "drink me"),
    ("Who dropped the white kid gloves and the fan?", "rabbit"),
)
ANSWER_TOKENS = 32
BLOCK_SIZE = 128
DEVICE_BLOCKS = 6
CHUNK_TOKENS = 1024
MAX_MODEL_LEN = 8192  # the model's positions


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model was asked and what it said; `output` has the prompt's tokens and the times."""

    question: str
    expected: str
    text: str
    output: RequestOutput

    @property
    def is_right(self) -> bool:
        """Whether the answer contains the expected words, wherever its lines break."""
        return self.expected in " ".join(self.text.lower().split())


def story() -> str:
    """The text, about 6,000 tokens, with its lines as they are."""
    return files("nanovllm.smollm2").joinpath("alice.txt").read_text(encoding="ascii")


def conversation(question: str) -> list[dict[str, str]]:
    """The text and a question about it, as a user's only message."""
    return [{"role": "user", "content": f"{story()}\n\nQuestion: {question} Answer briefly."}]


def read(model_dir: str | Path, device: str | None = None) -> tuple[list[Answer], KVStats]:
    """Ask all questions, greedily, one after the other; the later ones find the text in the prefix cache.

    device: as LLM's. Errors: those of LLM.
    """
    # The model likes to go on after its answer, in a paragraph of its own.
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, stop="\n\n")
    with LLM(
        model_dir,
        device=device,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=CHUNK_TOKENS,
        kvcache_block_size=BLOCK_SIZE,
        enable_cpu_offload=True,
        num_gpu_blocks=DEVICE_BLOCKS,
        num_cpu_blocks=MAX_MODEL_LEN // BLOCK_SIZE,
    ) as llm:
        answers = []
        for question, expected in QUESTIONS:
            (output,) = llm.chat(conversation(question), params, use_tqdm=False)
            answers.append(Answer(question, expected, output.outputs[0].text.strip(), output))
        return answers, llm.kv_stats()
