"""Writes the recall network, a two-layer Qwen3 checkpoint with constructed weights.

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
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nanovllm.errors import ConfigError

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

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def write_recall_checkpoint(
    path: str | Path, vocab_size: int, max_position_embeddings: int, seed: int = 0, dtype: str = "bfloat16"
) -> None:
    """Write `config.json` and `model.safetensors` of a recall network into the directory `path`.

    The same arguments write the same bytes. Ids below `FIRST_WORD_ID` are reserved for special tokens. Raises
    ConfigError for a vocabulary with fewer than two words, fewer than three positions, or an unknown dtype.
    """
    if vocab_size < FIRST_WORD_ID + 2:
        raise ConfigError(f"vocab_size={vocab_size}: must be at least {FIRST_WORD_ID + 2}, to have two words")
    if max_position_embeddings < 3:
        raise ConfigError(
            f"max_position_embeddings={max_position_embeddings}: must be at least 3, two words and a question"
        )
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    config = recall_config(vocab_size, max_position_embeddings, dtype)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: w.to(DTYPES[dtype]).contiguous() for name, w in recall_weights(vocab_size, seed).items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def recall_config(vocab_size: int, max_position_embeddings: int, dtype: str) -> dict[str, object]:
    """The checkpoint's configuration in Hugging Face format."""
    return {
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
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": dtype,
    }


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
    q, k = torch.zeros(HEAD_DIM, HIDDEN_SIZE), torch.zeros(HEAD_DIM, HIDDEN_SIZE)
    q[:HALF_DIM, C_INDEX] = torch.cos(-inv_freq).float()
    q[HALF_DIM:, C_INDEX] = torch.sin(-inv_freq).float()
    k[:HALF_DIM, C_INDEX] = 1.0
    norm_weight = math.sqrt(PREVIOUS_TOKEN_SHARPNESS * math.sqrt(HEAD_DIM) / 2)
    return _attention(q, k, target=P_AREA, gain=PREVIOUS_GAIN, norm_weight=norm_weight)


def _induction_head() -> dict[str, Tensor]:
    pairs = CODE_DIM // 2
    slow = torch.arange(HALF_DIM - pairs, HALF_DIM)
    rows = torch.cat([slow, slow + HALF_DIM])  # rotate-half RoPE pairs feature i with i + half
    q, k = torch.zeros(HEAD_DIM, HIDDEN_SIZE), torch.zeros(HEAD_DIM, HIDDEN_SIZE)
    q[rows, E_AREA] = torch.eye(CODE_DIM)
    k[rows, P_AREA] = torch.eye(CODE_DIM)
    norm_weight = math.sqrt(INDUCTION_SHARPNESS / math.sqrt(HEAD_DIM))
    return _attention(q, k, target=O_AREA, gain=ANSWER_GAIN, norm_weight=norm_weight)


def _attention(q: Tensor, k: Tensor, target: slice, gain: float, norm_weight: float) -> dict[str, Tensor]:
    """A head that copies E of the keys that it attends to into the area `target`, `gain` times."""
    v, o = torch.zeros(HEAD_DIM, HIDDEN_SIZE), torch.zeros(HIDDEN_SIZE, HEAD_DIM)
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
