"""The models against Transformers, over families, RoPE kinds, shapes, biases and windows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, ROPES, edit_config, fix_rope, make_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from nanovllm.data.network import Network
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.layers.linear import RowAdapters
from nanovllm.models.hf_config import load_network_config
from nanovllm.models.loader import load_model
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer
from nanovllm.ops.attention import SequenceMetadata

CPU = torch.device("cpu")
# Logits have a spread of 4; a float32 matrix product of these sizes is exact to about 1e-6 of its terms.
FLOAT32_BOUND = 1e-4
# What a recurrence gives for the first tokens is a small product of q and k, normalized: more of the rounding is left.
RECURRENT_BOUND = 4e-4
PROMPT_LENGTHS = (1, 2, 37, 130)


class DenseKVCache:
    """K and V of each sequence, whole and in order; attention in fp64. Sequences are told apart by their table."""

    def __init__(self, windows: Sequence[int | None], scale: float, sinks: Sequence[Tensor] = ()) -> None:
        self.windows = windows
        self.scale = scale
        self.sinks = sinks
        self.held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        out = torch.empty_like(q)
        for piece in ctx.sequences:
            rows = slice(piece.query_start, piece.query_start + piece.query_len)
            key = (layer, piece.block_table[0])
            old = self.held.get(key, (k[:0], v[:0]))
            keys = torch.cat((old[0], k[rows]))
            values = torch.cat((old[1], v[rows]))
            self.held[key] = keys, values
            assert len(keys) == piece.total_len
            sinks = self.sinks[layer] if self.sinks else None
            out[rows] = causal_attention(q[rows], keys, values, self.windows[layer], self.scale, sinks).to(q.dtype)
        return out


class DenseStates:
    """A state slot for each sequence, and for one more that no sequence has."""

    def __init__(self, network: Network, num_sequences: int, dtype: torch.dtype) -> None:
        spec = network.recurrent
        assert spec is not None
        self.slots = torch.arange(0)
        self.kept = None
        shape = (network.num_layers, num_sequences + 1)
        self.held = torch.zeros(*shape, *spec.conv_shape, dtype=dtype), torch.zeros(*shape, *spec.state_shape)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.held[0][layer], self.held[1][layer]


def causal_attention(
    q: Tensor, keys: Tensor, values: Tensor, window: int | None, scale: float, sinks: Tensor | None
) -> Tensor:
    """Plain attention of the last len(q) positions over all of them, in fp64, and over a sink for each head."""
    groups = q.shape[1] // keys.shape[1]
    k, v = (t.double().repeat_interleave(groups, dim=1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    distance = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))
    hidden = (distance < 0) | (distance >= (window or len(keys)))
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is None:
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    with_sinks = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), dim=-1)
    return torch.einsum("hqk,khd->qhd", with_sinks.softmax(-1)[..., :-1], v)


def run(model: CausalLM, prompts: Sequence[Tensor], splits: Sequence[float]) -> list[Tensor]:
    """Logits at every position of every prompt, all prompts in one flat batch per step.

    splits: fractions at which prompts are cut into chunks.
    """
    network = model.network
    windows = tuple(attention.window for attention in model.attending)
    cache = DenseKVCache(windows, network.attention_scale, model.sinks)
    states = None if network.recurrent is None else DenseStates(network, len(prompts), model.dtype)
    starts = [0] * len(prompts)
    logits: list[list[Tensor]] = [[] for _ in prompts]
    for split in (*splits, 1):
        ends = [int(len(prompt) * split) for prompt in prompts]
        hidden = _step(model, prompts, starts, ends, cache, states)
        pieces = hidden.split([end - start for start, end in zip(starts, ends, strict=True)])
        for kept, piece in zip(logits, pieces, strict=True):
            kept.append(model.compute_logits(piece))
        starts = ends
    return [torch.cat(parts) for parts in logits]


def _step(
    model: CausalLM,
    prompts: Sequence[Tensor],
    starts: list[int],
    ends: list[int],
    cache: DenseKVCache,
    states: DenseStates | None,
) -> Tensor:
    slices = []
    ids = []
    row = 0
    for number, (prompt, start, end) in enumerate(zip(prompts, starts, ends, strict=True)):
        if end == start:
            continue
        slices.append(SequenceMetadata.full(row, end - start, start, (number,)))
        ids.append(prompt[start:end])
        row += end - start
    if states is not None:
        states.slots = torch.tensor([part.block_table[0] for part in slices]) + 1
    positions = torch.cat([part.positions() for part in slices])
    ctx = ForwardContext(positions, tuple(slices), cache, states=states)
    return model(torch.cat(ids), ctx)


def random_prompts(vocab: int, lengths: Sequence[int] = PROMPT_LENGTHS, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=generator) for n in lengths]


@torch.no_grad()
def reference(model: PreTrainedModel, prompts: Sequence[Tensor]) -> list[Tensor]:
    return [model(prompt[None]).logits[0].float() for prompt in prompts]


def load(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(path, load_network_config(path), dtype, CPU)


def assert_same_logits(model: PreTrainedModel, path: Path, prompts: Sequence[Tensor] | None = None) -> None:
    """Whole prompts in one step, and cut in two, against Transformers."""
    own = load(path)
    prompts = random_prompts(own.vocab_size) if prompts is None else prompts
    expected = reference(model, prompts)
    bound = FLOAT32_BOUND if own.network.recurrent is None else RECURRENT_BOUND
    for splits in ((), (0.4,)):
        for ours, theirs in zip(run(own, prompts, splits), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=bound, rtol=0)


# heads, kv_heads, head_dim: 1 to 4 query heads per KV head, head_dim 16 to 128
GEOMETRIES = (
    (4, 4, 16),
    (4, 2, 32),
    (3, 1, 48),
    (4, 1, 64),
    (2, 1, 80),
    (6, 2, 96),
    (4, 2, 112),
    (2, 2, 128),
)
OPTIONS = {name: tested.options for name, tested in FAMILIES.items() if tested.options}
COMBINATIONS = [
    pytest.param(
        family,
        rope,
        GEOMETRIES[(2 * i + 3 * j) % len(GEOMETRIES)],
        (i + j) % 2 == 1,
        OPTIONS[family][j % len(OPTIONS[family])],
        id=f"{family}-{rope}",
        marks=() if (i + j) % len(ROPES) in (0, 2) else pytest.mark.slow,
    )
    for i, family in enumerate(OPTIONS)
    for j, rope in enumerate(ROPES)
]


@pytest.mark.parametrize(("family", "rope", "geometry", "tie", "options"), COMBINATIONS)
def test_logits_equal_transformers(
    tmp_path: Path, family: str, rope: str, geometry: tuple[int, int, int], tie: bool, options: dict[str, Any]
) -> None:
    heads, kv_heads, head_dim = geometry
    shape: dict[str, Any] = {"hidden": 96, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    model = make_checkpoint(tmp_path, family, rope=ROPES[rope], tie=tie, **shape, **options)
    assert_same_logits(model, tmp_path)


@pytest.mark.parametrize("window", [1, 7, 129, 130, 131])
def test_window_edges_equal_transformers(tmp_path: Path, window: int) -> None:
    model = make_checkpoint(tmp_path, "mistral", sliding_window=window)
    assert_same_logits(model, tmp_path)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_layer_types_choose_the_windowed_layers(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family, layers=3, sliding_window=9)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    edit_config(tmp_path, layer_types=kinds)
    assert load_network_config(tmp_path).network.kv_windows == (9, None, 9)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert_same_logits(model, tmp_path)


@pytest.mark.parametrize("longest", [32, 33, 96])
def test_dynamic_rope_is_that_of_the_longest_sequence(tmp_path: Path, longest: int) -> None:
    """Transformers has the same frequencies if its first prompt is of that length."""
    model = make_checkpoint(tmp_path, "llama", rope=ROPES["dynamic"], max_positions=32, head_dim=32)
    own = load_model(tmp_path, load_network_config(tmp_path).for_length(longest), torch.float32, CPU)
    prompts = random_prompts(199, (longest, 5))
    (whole,) = reference(model, prompts[:1])
    fix_rope(model, longest)
    expected = reference(model, prompts)
    torch.testing.assert_close(expected[0], whole, atol=FLOAT32_BOUND, rtol=0)
    for ours, theirs in zip(run(own, prompts, (0.4,)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=FLOAT32_BOUND, rtol=0)


def test_row_chunks_do_not_change_the_result(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    model = load(tmp_path)
    prompts = random_prompts(199)
    whole = run(model, prompts, ())
    for rows in (1, 16, 169, 170):  # 170 tokens in all
        model.chunk_rows = rows
        for ours, theirs in zip(run(model, prompts, ()), whole, strict=True):
            torch.testing.assert_close(ours, theirs, atol=FLOAT32_BOUND, rtol=0)


def test_a_layer_with_a_method_of_its_own_has_no_kernels_for_few_rows(tmp_path: Path) -> None:
    """They call no methods of a layer: decode would compute something else than prefill."""
    make_checkpoint(tmp_path, "qwen3")
    model = load_model(tmp_path, load_network_config(tmp_path), torch.float32, torch.device("cpu"))

    class Doubled(Qwen3DecoderLayer):
        def _mlp_output(self, x: Tensor, normed: Tensor, adapters: RowAdapters | None) -> Tensor:
            return 2 * super()._mlp_output(x, normed, adapters)

    class Halved(Qwen3Attention):
        def place_heads(self, heads: Tensor, *others: Tensor) -> None:
            super().place_heads(heads / 2, *others)

    layer, other = model.layers
    assert layer._few_rows is not None and other._few_rows is not None
    layer.__class__ = Doubled
    other.mixer.__class__ = Halved
    for changed in (layer, other):
        changed.finish_loading()
        assert changed._few_rows is None
