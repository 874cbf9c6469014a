"""Heads for multi-token prediction in tests: written beside a checkpoint, and computed in plain torch."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

Weights = dict[str, Tensor]  # without "mtp."


def add_mtp_head(path: Path, *, predicts: bool = False) -> None:
    """Add a random head to a checkpoint of two layers, of which the last has attention.

    predicts: a head that is often right, of a model whose next token depends on the last one mostly.
    """
    file = path / "model.safetensors"
    generator = torch.Generator().manual_seed(7)
    stored = load_file(file)
    layer = {name: tensor for name, tensor in stored.items() if name.startswith("model.layers.1.")}
    hidden = stored["model.norm.weight"].shape[0]
    shapes = {name.replace("model.layers.1.", "mtp.layers.0."): tensor.shape for name, tensor in layer.items()}
    norms = dict.fromkeys(("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"), (hidden,))
    shapes |= {f"{name}.weight": torch.Size(shape) for name, shape in norms.items()}
    shapes["mtp.fc.weight"] = torch.Size((hidden, 2 * hidden))
    for name, shape in shapes.items():
        gain = 0.3 if len(shape) == 1 else 1.2 / shape[-1] ** 0.5
        stored[name] = (gain * torch.randn(shape, generator=generator)).to(layer[next(iter(layer))].dtype)
    if predicts:
        for name in stored:
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                stored[name] *= 0.1
        stored["mtp.fc.weight"] = torch.eye(hidden, 2 * hidden, dtype=stored["mtp.fc.weight"].dtype)
        stored["mtp.pre_fc_norm_embedding.weight"].zero_()
        stored["mtp.norm.weight"] = stored["model.norm.weight"].clone()
    save_file(stored, file, {"format": "pt"})


def head_weights(path: Path) -> Weights:
    stored = load_file(path / "model.safetensors")
    return {name.removeprefix("mtp."): tensor.float() for name, tensor in stored.items() if name.startswith("mtp.")}


@torch.inference_mode()
def head_logits(model: PreTrainedModel, weights: Weights, token_ids: list[int], drafts: list[int]) -> list[Tensor]:
    """The logits of the draft after `token_ids`, and of those after each of `drafts` but the last.

    The row of position p is made of the embedding of the token at p + 1 and of the model's hidden state at p after the
    final norm; for drafts it is the head's own.
    """
    hidden = model.model(torch.tensor([token_ids])).last_hidden_state[0, :-1]
    read = list(token_ids[1:])
    logits = []
    for draft in drafts:
        embedded = model.get_input_embeddings()(torch.tensor(read))
        names = {"pre_fc_norm_embedding": embedded, "pre_fc_norm_hidden": hidden}
        both = torch.cat([norm(x, weights[f"{name}.weight"]) for name, x in names.items()], dim=1)
        out = norm(layer_of(model, weights, both @ weights["fc.weight"].T), weights["norm.weight"])
        logits.append(model.lm_head(out[-1]))
        hidden = torch.cat((hidden, out[-1:]))
        read = [*read, draft]
    return logits


def layer_of(model: PreTrainedModel, weights: Weights, x: Tensor) -> Tensor:
    """A layer with gated attention, of rows that begin at position 0."""
    own = {name.removeprefix("layers.0."): tensor for name, tensor in weights.items() if name.startswith("layers.0.")}
    config = model.config
    rows = x.shape[0]
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    size = config.head_dim
    normed = norm(x, own["input_layernorm.weight"])
    q, gate = (normed @ own["self_attn.q_proj.weight"].T).view(rows, heads, 2 * size).chunk(2, dim=-1)
    k, v = ((normed @ own[f"self_attn.{name}_proj.weight"].T).view(rows, kv_heads, size) for name in "kv")
    q, k = (turned(norm(tensor, own[f"self_attn.{name}_norm.weight"])) for tensor, name in ((q, "q"), (k, "k")))
    k, v = (tensor.repeat_interleave(heads // kv_heads, dim=1) for tensor in (k, v))
    scores = torch.einsum("phd,qhd->hpq", q, k) * size**-0.5
    scores += torch.full((rows, rows), float("-inf")).triu(1)
    mixed = torch.einsum("hpq,qhd->phd", scores.softmax(-1), v) * gate.sigmoid()
    x = x + mixed.flatten(1) @ own["self_attn.o_proj.weight"].T
    normed = norm(x, own["post_attention_layernorm.weight"])
    return x + (experts(config, own, normed) if "mlp.gate.weight" in own else mlp(own, "mlp.", normed))


def experts(config: object, own: Weights, x: Tensor) -> Tensor:
    """The experts of each row, whose weights have the sum 1, and the shared one by its gate."""
    weights, chosen = (x @ own["mlp.gate.weight"].T).softmax(-1).topk(config.num_experts_per_tok, dim=-1)  # type: ignore[attr-defined]
    weights = weights / weights.sum(-1, keepdim=True)
    share = (x @ own["mlp.shared_expert_gate.weight"].T).sigmoid()
    out = share * mlp(own, "mlp.shared_expert.", x)
    for row, (of_row, numbers) in enumerate(zip(weights, chosen.tolist(), strict=True)):
        for weight, number in zip(of_row, numbers, strict=True):
            out[row] += weight * mlp(own, f"mlp.experts.{number}.", x[row])
    return out


def mlp(own: Weights, prefix: str, x: Tensor) -> Tensor:
    gate, up, down = (own[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + weight)


def turned(x: Tensor) -> Tensor:
    """RoPE of the first quarter of each head's features: [rows, heads, head_dim]."""
    half = x.shape[-1] // 8
    angles = torch.arange(x.shape[0])[:, None, None] * 10_000.0 ** (-torch.arange(half) / half)
    first = x[..., :half]
    second = x[..., half : 2 * half]
    rest = x[..., 2 * half :]
    cos = angles.cos()
    sin = angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
