"""A real model answers questions about a real text, with most of its KV cache on the host.

The text is the first two chapters of "Alice's Adventures in Wonderland" by Lewis Carroll, 1865, in the public domain:
Project Gutenberg's Millennium Fulcrum Edition 2.9, from alice29.txt, a file that compressors are tested with.

A model of 135 million parameters answers few questions about so long a text. These two were chosen from about thirty
because the model answers them. Most of the text's KV is on the host when it answers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from nanovllm import LLM, KVStats, RequestOutput, SamplingParams

BOOK = "Alice's Adventures in Wonderland"
# Each with lower-case words that a right answer contains. The first one is about the first chapter.
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
    """A question and the model's answer. `output` has the prompt's tokens and the times."""

    question: str
    expected: str
    text: str
    output: RequestOutput

    @property
    def is_right(self) -> bool:
        """Whether the answer contains the expected words, regardless of line breaks."""
        return self.expected in " ".join(self.text.lower().split())


def title(is_short: bool) -> str:
    """What `story` gives."""
    return f"the first {'chapter' if is_short else 'two chapters'} of {BOOK}"


def story(is_short: bool = False) -> str:
    """The text, about 6,000 tokens; if short, its first chapter, 3,000."""
    text = files("nanovllm.apps.real_models").joinpath("alice.txt").read_text(encoding="ascii")
    return text[: text.index("CHAPTER II")].rstrip() if is_short else text


def conversation(text: str, question: str) -> list[dict[str, str]]:
    """A text and a question about it, as a user's only message."""
    return [{"role": "user", "content": f"{text}\n\nQuestion: {question} Answer briefly."}]


def read(model_dir: str | Path, device: str | None = None, is_short: bool = False) -> tuple[list[Answer], KVStats]:
    """Ask all questions in turn with greedy sampling. Later questions find the text in the prefix cache.

    device: as in LLM. is_short: ask the first question about the first chapter alone. Raises the errors of LLM.
    """
    text = story(is_short)
    # The model often continues after its answer with another paragraph.
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
        for question, expected in QUESTIONS[:1] if is_short else QUESTIONS:
            (output,) = llm.chat(conversation(text, question), params, use_tqdm=sys.stderr.isatty())
            answers.append(Answer(question, expected, output.outputs[0].text.strip(), output))
        return answers, llm.kv_stats()
