"""The recall network, a two-layer Qwen3 checkpoint with constructed weights, and documents for it.

The prompt is a document in which every token occurs once, followed by one of its tokens. The network answers with the
token that followed it, then the next one, and so on. Each answer is read from one KV row, so that a single wrong, stale
or half-copied row changes it. Random weights attend almost evenly and would hide such an error.

The residual stream has three areas of `CODE_DIM` features and a constant: E, the code of this token; P, the code of the
previous token; O, the code of the answer; c, the same for all tokens.

- Layer 0 copies E of position p - 1 into P of position p. Its q and k depend on c only, so before RoPE they are
  constants. With k one on the first half and q turned back by one position, the score at distance D is proportional to
  sum_i cos(inv_freq_i * (D - 1)), which peaks at D = 1.
- Layer 1 matches E of the query with P of the keys and copies E of the match into O. It uses only the slowest RoPE
  pairs, which turn by 0.004 rad over 128K positions, since `ROPE_THETA` is large.
- The output head reads O by code and subtracts half as much of E. The reason is position 0, which has no previous
  token: in layer 0 it attends to itself, and P becomes its own code. Layer 1 therefore finds token 0 at positions 0 and
  1 alike, and O is half token 0 and half token 1. No token follows itself, so the code in E is never the answer.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor

from nanovllm.errors import ConfigError, RequestError

UNK_TOKEN = "<unk>"
EOS_TOKEN = "<eos>"
EOS_TOKEN_ID = 1
FIRST_WORD_ID = 2  # ids below it are reserved; from here to the vocabulary's end all ids are ordinary words

NUM_LAYERS = 2
NUM_KV_HEADS = 1
CODE_DIM = 48
HEAD_DIM = 128
HALF_DIM = HEAD_DIM // 2
HIDDEN_SIZE = 3 * CODE_DIM + 16
INTERMEDIATE_SIZE = 16
ROPE_THETA = 1e12

E_AREA = slice(0, CODE_DIM)
P_AREA = slice(CODE_DIM, 2 * CODE_DIM)
O_AREA = slice(2 * CODE_DIM, 3 * CODE_DIM)
C_INDEX = 3 * CODE_DIM

# Softmax scores of a perfect match: per RoPE pair in layer 0, in all in layer 1.
PREVIOUS_TOKEN_SHARPNESS = 40.0
INDUCTION_SHARPNESS = 120.0

# A head's output per unit of E after RMSNorm. The _LEVEL of an area is the size of its features in the residual
# stream, relative to E; c has the same norm as E. RMSNorm divides by the root of their mean square.
PREVIOUS_GAIN = 2.0
ANSWER_GAIN = 8.0
HEAD_GAIN = 4.0
PREVIOUS_LEVEL = PREVIOUS_GAIN / math.sqrt(CODE_DIM * 2 / HIDDEN_SIZE)
ANSWER_LEVEL = ANSWER_GAIN / math.sqrt(CODE_DIM * (2 + PREVIOUS_LEVEL**2) / HIDDEN_SIZE)

SYLLABLES = [onset + vowel for onset in "bdfghjklmnprstvwyz" for vowel in "aeiou"]
SYLLABLES_PER_WORD = 3
MAX_WORDS = len(SYLLABLES) ** SYLLABLES_PER_WORD


def write_recall_checkpoint(
    path: str | Path, vocab_size: int, max_position_embeddings: int, seed: int = 0, dtype: str = "bfloat16"
) -> None:
    """Write `config.json` and `model.safetensors` of a recall network into the directory `path`.

    The same arguments write the same bytes. Ids below `FIRST_WORD_ID` are reserved for special tokens. dtype:
    "bfloat16" or "float32".
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 1,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": max_position_embeddings,
        "rope_theta": ROPE_THETA,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": dtype,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: w.to(getattr(torch, dtype)).contiguous() for name, w in recall_weights(vocab_size, seed).items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def recall_weights(vocab_size: int, seed: int) -> dict[str, Tensor]:
    """All weights in float32, by their Hugging Face names; linear weights are [out, in]."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2, (vocab_size, CODE_DIM), generator=generator).float() * 2 - 1
    embedding = torch.zeros(vocab_size, HIDDEN_SIZE)
    embedding[:, E_AREA] = codes
    embedding[:, C_INDEX] = math.sqrt(CODE_DIM)
    head = torch.zeros(vocab_size, HIDDEN_SIZE)
    head[:, O_AREA] = HEAD_GAIN * codes
    head[:, E_AREA] = -HEAD_GAIN * ANSWER_LEVEL / 2 * codes
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN_SIZE),
        "lm_head.weight": head,
    }
    for index, attention in enumerate((_previous_token_head(), _induction_head())):
        layer = {**attention, **_neutral_layer_parts()}
        weights.update({f"model.layers.{index}.{name}": weight for name, weight in layer.items()})
    return weights


def _previous_token_head() -> dict[str, Tensor]:
    inv_freq = ROPE_THETA ** (-torch.arange(HALF_DIM, dtype=torch.float64) / HALF_DIM)
    q = torch.zeros(HEAD_DIM, HIDDEN_SIZE)
    k = torch.zeros(HEAD_DIM, HIDDEN_SIZE)
    q[:HALF_DIM, C_INDEX] = torch.cos(-inv_freq).float()
    q[HALF_DIM:, C_INDEX] = torch.sin(-inv_freq).float()
    k[:HALF_DIM, C_INDEX] = 1.0
    norm_weight = math.sqrt(PREVIOUS_TOKEN_SHARPNESS * math.sqrt(HEAD_DIM) / 2)
    return _attention(q, k, target=P_AREA, gain=PREVIOUS_GAIN, norm_weight=norm_weight)


def _induction_head() -> dict[str, Tensor]:
    pairs = CODE_DIM // 2
    slow = torch.arange(HALF_DIM - pairs, HALF_DIM)
    rows = torch.cat([slow, slow + HALF_DIM])  # rotate-half RoPE pairs feature i with i + half
    q = torch.zeros(HEAD_DIM, HIDDEN_SIZE)
    k = torch.zeros(HEAD_DIM, HIDDEN_SIZE)
    q[rows, E_AREA] = torch.eye(CODE_DIM)
    k[rows, P_AREA] = torch.eye(CODE_DIM)
    norm_weight = math.sqrt(INDUCTION_SHARPNESS / math.sqrt(HEAD_DIM))
    return _attention(q, k, target=O_AREA, gain=ANSWER_GAIN, norm_weight=norm_weight)


def _attention(q: Tensor, k: Tensor, target: slice, gain: float, norm_weight: float) -> dict[str, Tensor]:
    """A head that copies E of the keys that it attends to into the area `target`, `gain` times."""
    v = torch.zeros(HEAD_DIM, HIDDEN_SIZE)
    o = torch.zeros(HIDDEN_SIZE, HEAD_DIM)
    v[:CODE_DIM, E_AREA] = torch.eye(CODE_DIM)
    o[target, :CODE_DIM] = gain * torch.eye(CODE_DIM)
    return {
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.o_proj.weight": o,
        "self_attn.q_norm.weight": torch.full((HEAD_DIM,), norm_weight),
        "self_attn.k_norm.weight": torch.full((HEAD_DIM,), norm_weight),
    }


def _neutral_layer_parts() -> dict[str, Tensor]:
    """Norms of ones, and an MLP that adds nothing."""
    return {
        "input_layernorm.weight": torch.ones(HIDDEN_SIZE),
        "post_attention_layernorm.weight": torch.ones(HIDDEN_SIZE),
        "mlp.gate_proj.weight": torch.zeros(INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.up_proj.weight": torch.zeros(INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.down_proj.weight": torch.zeros(HIDDEN_SIZE, INTERMEDIATE_SIZE),
    }


# ---- documents


def make_words(count: int, seed: int = 0) -> list[str]:
    """`count` distinct lower-case words of three open syllables each, in an order drawn from the seed."""
    if count > MAX_WORDS:
        raise ConfigError(f"{count} words were asked for: three syllables make at most {MAX_WORDS}")
    return [_word(number) for number in random.Random(seed).sample(range(MAX_WORDS), count)]


def write_word_tokenizer(path: str | Path, vocab_size: int, seed: int = 0) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` for `vocab_size` ids into the directory `path`.

    Ids 0 and 1 are `<unk>` and `<eos>`; all others are distinct words. Text is split at white space, encoding adds no
    special tokens, and decoding joins words by single spaces. Raises ConfigError for more words than three syllables
    can spell.
    """
    words = [UNK_TOKEN, EOS_TOKEN, *make_words(vocab_size - FIRST_WORD_ID, seed)]
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNK_TOKEN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(UNK_TOKEN, special=True), AddedToken(EOS_TOKEN, special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": UNK_TOKEN,
        "eos_token": EOS_TOKEN,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _word(number: int) -> str:
    count = len(SYLLABLES)
    return "".join(SYLLABLES[number // count**place % count] for place in range(SYLLABLES_PER_WORD))


def make_document(vocab_size: int, length: int, seed: int = 0) -> list[int]:
    """`length` distinct token ids of ordinary words: the start of a random permutation of the vocabulary."""
    return random.Random(seed).sample(range(FIRST_WORD_ID, vocab_size), length)


def make_prompt(document: Sequence[int], position: int) -> list[int]:
    """The prompt whose answer starts at `document[position]`: the document, then the token before that position."""
    return [*document, document[position - 1]]


def expected_answer(document: Sequence[int], position: int, count: int) -> list[int]:
    """The `count` tokens that the network must generate for `make_prompt(document, position)`."""
    return list(document[position : position + count])


def notable_positions(
    length: int, answer_tokens: int, pieces: Mapping[str, int], max_edges: int | None = None
) -> dict[int, str]:
    """Positions in a document of `length` tokens at which errors are likely, in order, each with a description.

    These are position 1, the middle and the end, and for each named piece size ("block", "chunk") the last token before
    and the first token after the edges between pieces: all edges, or `max_edges` evenly spread ones. Positions with
    fewer than `answer_tokens` tokens of document after them are left out. Raises RequestError if none are left.
    """
    last = length - answer_tokens
    if last < 1:
        raise RequestError(
            f"a document of {length} tokens has no room for an answer of {answer_tokens}: it must"
            f" have at least {answer_tokens + 1}"
        )
    positions = {1: "start", length // 2: "middle", last: "end"}
    for name, size in pieces.items():
        for edge in _spread((length - 1) // size, max_edges):
            positions.setdefault(edge * size - 1, f"last token of {name} {edge - 1}")
            positions.setdefault(edge * size, f"first token of {name} {edge}")
    return {position: positions[position] for position in sorted(positions) if 1 <= position <= last}


def _spread(count: int, limit: int | None) -> list[int]:
    """At most `limit` of 1..count, evenly spread, both ends included."""
    if limit is None or count <= limit:
        return list(range(1, count + 1))
    return [1 + round(i * (count - 1) / max(limit - 1, 1)) for i in range(limit)]


@dataclass(frozen=True)
class WordExam:
    """A document of token ids, the word of each id, and the positions that are asked for with their descriptions."""

    document: list[int]
    words: dict[int, str]
    positions: dict[int, str]
    answer_tokens: int

    @classmethod
    def write(
        cls,
        path: str | Path,
        document_tokens: int,
        answer_tokens: int,
        pieces: Mapping[str, int],
        max_edges: int | None = None,
        seed: int = 0,
    ) -> WordExam:
        """Write a model with exactly `document_tokens` words into `path`; the document holds each word once.

        pieces and max_edges choose the questions, as in `notable_positions`. Raises the errors of `write_demo_model`,
        and RequestError for a document that is too short for an answer.
        """
        vocab_size = write_demo_model(path, document_tokens, answer_tokens, seed)
        return cls(
            document=make_document(vocab_size, document_tokens, seed),
            words=dict(enumerate(make_words(document_tokens, seed), FIRST_WORD_ID)),
            positions=notable_positions(document_tokens, answer_tokens, pieces, max_edges),
            answer_tokens=answer_tokens,
        )

    def question(self, position: int) -> str:
        """The word that the answer starting at `position` follows."""
        return self.words[self.document[position - 1]]

    def expected(self, position: int) -> str:
        """The only right answer at `position`, as text."""
        return self._text(expected_answer(self.document, position, self.answer_tokens))

    def prompts(self) -> list[str]:
        """The document and a question word, for each position in order."""
        return [self._text(make_prompt(self.document, position)) for position in self.positions]

    def _text(self, tokens: list[int]) -> str:
        return " ".join(self.words[token] for token in tokens)


def write_demo_model(path: str | Path, document_tokens: int, answer_tokens: int, seed: int = 0) -> int:
    """Write a bfloat16 recall checkpoint and its word tokenizer; returns the vocabulary size.

    The vocabulary has exactly `document_tokens` words. The model has positions for a document of all words, a question
    word and an answer of `answer_tokens`. Raises the errors of `write_recall_checkpoint` and `write_word_tokenizer`.
    """
    vocab_size = FIRST_WORD_ID + document_tokens
    write_recall_checkpoint(path, vocab_size, document_tokens + 1 + answer_tokens, seed)
    write_word_tokenizer(path, vocab_size, seed)
    return vocab_size
