"""Time to first token of a session's last turn, beside a full prefill of the same prompt: ours and llama.cpp's.

Both engines run one GGUF file of a real model. The session is "reasoning stripped" of `benchmarks.session_patterns`.
Its system prompt is as long as its last prompt needs, and each engine gets its own answers back.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.peers.process import asking, command
from benchmarks.session_patterns import Session, Talk, Tokens, stripped
from nanovllm import LLM, SamplingParams
from nanovllm.apps.real_models import gemma3, smollm2
from nanovllm.data.kv_groups import kv_groups
from nanovllm.models.hf_config import load_network_config

BLOCK = 256
WORDS = 20_000  # of token ids, which are below it: both vocabularies have more
# A prompt, the tokens of its answer, and whether to forget all prompts before give the answer and seconds to its first
# token.
Answer = Callable[[Tokens, int, bool], tuple[Tokens, float]]


@dataclass(frozen=True, slots=True)
class RealModel:
    """fetch: gives the model's GGUF file, which may be put into a directory. tokens: of the last prompt."""

    fetch: Callable[[Path], Path]
    tokens: int


MODELS: Mapping[str, RealModel] = {
    "gemma3": RealModel(lambda directory: gemma3.checkpoint(), 24_000),
    "smollm2": RealModel(smollm2.FILE.fetch, 7_000),
}


@dataclass(frozen=True, slots=True)
class FirstToken:
    """prompt_len: of the last turn. turns: seconds to the first token of each turn."""

    engine: str
    model: str
    prompt_len: int
    turns: list[float]
    full_prefill: float

    @property
    def ratio(self) -> float:
        return self.turns[-1] / self.full_prefill


def talk_of(tokens: int) -> Talk:
    """A talk whose last prompt with stripped reasoning has `tokens` tokens."""
    usual = Talk(vocab=WORDS)
    kept = usual.answer - usual.reasoning
    system = tokens - usual.turns * usual.message - (usual.turns - 1) * kept
    return Talk(system=system, vocab=WORDS)


@contextmanager
def own_engine(gguf: Path, tokens: int) -> Iterator[Answer]:
    """This engine, with room for the session and for its last prompt once more."""
    groups = kv_groups(load_network_config(gguf).network.kv_windows, BLOCK)
    blocks = (3 * tokens // BLOCK + 16) * len(groups)
    with LLM(gguf, device="cpu", kvcache_block_size=BLOCK, num_gpu_blocks=blocks, max_num_seqs=4, swap_space=0) as llm:
        count = 0

        def answer(prompt: Tokens, length: int, is_fresh: bool) -> tuple[Tokens, float]:
            nonlocal count
            count += 1
            salt = {"cache_salt": str(count)} if is_fresh else {}
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            (output,) = llm.generate([{"prompt_token_ids": prompt, **salt}], params, use_tqdm=False)
            seconds = output.metrics.ttft
            assert seconds is not None, "the answer has tokens"
            return output.outputs[0].token_ids, seconds

        yield answer


@contextmanager
def llama_cpp(python: Path, gguf: Path, tokens: int) -> Iterator[Answer]:
    """llama.cpp in a process of `python`, whose environment has its bindings."""
    settings = {"threads": torch.get_num_threads(), "max_len": tokens + BLOCK}
    arguments = command(python, "benchmarks.peers.run_llama_session", str(gguf), json.dumps(settings))
    with asking("llama.cpp", arguments) as ask:

        def answer(prompt: Tokens, length: int, is_fresh: bool) -> tuple[Tokens, float]:
            generated, seconds = ask({"prompt": prompt, "tokens": length, "fresh": is_fresh})
            return generated, seconds

        yield answer


def first_tokens(engine: str, model: str, answer: Answer, talk: Talk) -> FirstToken:
    """Play the session, then compute its last prompt as if nothing had been before."""
    answer(talk.words(BLOCK, "warm up"), 8, False)
    session: Session = stripped(talk, "session")
    seconds = list[float]()
    prompt = next(session)
    while True:
        tokens, first = answer(prompt, talk.answer, False)
        seconds.append(first)
        try:
            prompt = session.send(tokens)
        except StopIteration:
            break
    _, full = answer(prompt, 1, True)
    return FirstToken(engine, model, len(prompt), seconds, full)


def measure(name: str, tokens: int | None, python: Path | None) -> Iterator[FirstToken]:
    """tokens: of the last prompt; None: the model's own number. python: of llama.cpp's environment, if there is one."""
    model = MODELS[name]
    length = tokens or model.tokens
    talk = talk_of(length)
    with tempfile.TemporaryDirectory() as directory:
        gguf = model.fetch(Path(directory))
        with own_engine(gguf, length) as answer:
            yield first_tokens("nanovllm", name, answer, talk)
        if python is not None:
            with llama_cpp(python, gguf, length) as answer:
                yield first_tokens("llama.cpp", name, answer, talk)
