"""Gemma 4: heads of two sizes, layers that read the K and V of earlier ones, layers with inputs of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_config, make_checkpoint, refusal
from cpu_attention_helpers import add_cpu_attention_streams, force_share
from engines import greedy, greedy_reference, logits_by_request, offloaded, random_prompt, token_ids
from fast import fast_only
from safetensors.torch import load_file, save_file
from test_models import assert_same_logits
from transformers import (
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
)

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.data.network import RopeSpec
from nanovllm.errors import ConfigError
from nanovllm.layers.parallel import MetaRanks
from nanovllm.memory.layout import layout_of
from nanovllm.models.hf_config import load_network_config, read_network_config
from nanovllm.models.loader import load_model

VOCAB = 199
BLOCK = 16
SLIDING = "sliding_attention"
FULL = "full_attention"
# Like E2B and E4B: one KV head, inputs of each layer, and half of the layers without keys and values.
SMALL: dict[str, Any] = {
    "layers": 8,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "sliding_window": 20,
    "kv_heads": 1,
    "hidden_size_per_layer_input": 24,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 3.0,
    "tie": True,
}
# Like 31B: fewer KV heads in layers with full attention, whose values are their keys.
LARGE: dict[str, Any] = {
    "layers": 6,
    "layer_types": [SLIDING, SLIDING, FULL] * 2,
    "sliding_window": 20,
    "kv_heads": 4,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "tie": True,
}
# Like 26B-A4B: with experts beside the MLP.
MIXTURE: dict[str, Any] = {
    **LARGE,
    "layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 40,
}
# Heads whose bytes are no multiple of each other: blocks of whole hash blocks, which do not fill their memory.
ODD: dict[str, Any] = {"layers": 4, "layer_types": [SLIDING, FULL] * 2, "sliding_window": 9, "global_head_dim": 48}
MODELS = {
    **{"small": SMALL, "large": LARGE, "mixture": MIXTURE},
    "odd": {**ODD, "head_dim": 32, "attention_bias": True},
}
ALL = pytest.mark.parametrize("name", MODELS)
FEWER = pytest.mark.parametrize("name", fast_only(["large"], MODELS))
TIGHT = 40  # KV blocks that are too few for all sequences
RESIDENT: dict[str, Any] = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 80}


@ALL
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    assert_same_logits(make_checkpoint(tmp_path, "gemma4", **MODELS[name]), tmp_path)


@pytest.mark.parametrize("name", fast_only(["small", "mixture"], MODELS))
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """In chunks, from the prefix cache, layer by layer where the model can, and with CPU attention."""
    model = make_checkpoint(tmp_path, "gemma4", **MODELS[name])
    prompt = random_prompt(6 * BLOCK + 5, VOCAB, seed=4)
    expected = [greedy_reference(model, prompt, 12)]
    for arguments in ({**RESIDENT, "max_num_batched_tokens": 29}, offloaded(BLOCK, max_num_batched_tokens=29)):
        with LLM(tmp_path, dtype="float32", **arguments) as llm:
            first = token_ids(llm, prompt, greedy(12))
            (second,) = llm.generate(prompt, greedy(12), use_tqdm=False)
            assert first == [second.outputs[0].token_ids] == expected
            assert second.num_cached_tokens >= 4 * BLOCK


@FEWER
def test_bits_do_not_depend_on_batch_and_chunk(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gemma4", dtype="bfloat16", **MODELS[name])
    prompts = [random_prompt(length, VOCAB, seed=length) for length in (70, 3, 41)]
    found = []
    for budget, at_once in ((29, 8), (1, 1), (7, 8), (64, 1), (200, 1)):
        with LLM(tmp_path, max_num_batched_tokens=budget, max_num_seqs=at_once, **RESIDENT) as llm:
            found.append(logits_by_request(llm, prompts, 6))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(row, other[key]) for key, row in found[0].items())


@pytest.mark.parametrize("name", fast_only(["small"], MODELS))
def test_groups_of_sequences_and_preemption(name: str, tmp_path: Path) -> None:
    """Forks, copies on write, sequences swapped out or computed again: the tokens of a roomy engine."""
    make_checkpoint(tmp_path, "gemma4", **MODELS[name])
    prompts = [random_prompt(length, VOCAB, seed=7) for length in (83, 3 * BLOCK, 5, 60)]
    params = [SamplingParams(n=3, max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(4)]

    def answers(**arguments: Any) -> tuple[list[list[list[int]]], int, int]:
        with LLM(tmp_path, dtype="float32", max_num_batched_tokens=33, max_model_len=128, **arguments) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            manager = llm.engine.scheduler.block_manager
            metrics = llm.engine.scheduler.preemption.stats
            assert manager.num_copied_blocks > 0 and manager.pool.num_used == manager.pool.num_swapped == 0
            found = [[each.token_ids for each in output.outputs] for output in outputs]
            return found, metrics.swapped, metrics.recomputed

    expected, *_ = answers(kvcache_block_size=BLOCK, num_gpu_blocks=400)
    tight = {"kvcache_block_size": BLOCK, "num_gpu_blocks": TIGHT}
    for arguments, way in (
        ({**tight, "preemption_mode": "swap", "swap_space": 0.1}, "swap"),
        ({**tight, "preemption_mode": "recompute"}, "recompute"),
        (offloaded(BLOCK, 4, TIGHT - 4, preemption_mode="swap", swap_space=0.1), "swap"),
    ):
        found, swapped, recomputed = answers(**arguments)
        assert found == expected
        assert swapped > 0 if way == "swap" else recomputed > 0


@FEWER
def test_concurrent_cpu_attention(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor attends to half of the host blocks, in groups of each head size."""
    model = make_checkpoint(tmp_path, "gemma4", **MODELS[name])
    prompts = [random_prompt(length, VOCAB, seed=6) for length in (90, 5 * BLOCK)]
    expected = [greedy_reference(model, prompt, 12) for prompt in prompts]
    add_cpu_attention_streams(monkeypatch)
    with LLM(tmp_path, dtype="float32", **offloaded(BLOCK, max_num_batched_tokens=31)) as llm:
        force_share(llm, 0.5)
        assert token_ids(llm, prompts, greedy(12)) == expected
        assert llm.kv_stats().transfers.cpu_attention_blocks > 0


@FEWER
def test_blocks_on_disk_and_drafts(name: str, tmp_path: Path) -> None:
    """A later engine, with another memory budget, goes on from what the first one stored; drafts change no token."""
    model = make_checkpoint(tmp_path / "model", "gemma4", max_positions=1024, **MODELS[name])
    prompt = random_prompt(300, VOCAB, seed=2) * 2
    expected = [greedy_reference(model, prompt, 12)]
    roomy: dict[str, Any] = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 200}
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    for index, arguments in enumerate((roomy, offloaded(BLOCK, 8, 200), {**roomy, **drafts})):
        with LLM(tmp_path / "model", dtype="float32", kv_cache_dir=tmp_path / "disk", **arguments) as llm:
            (output,) = llm.generate(prompt, greedy(12), use_tqdm=False)
            assert [output.outputs[0].token_ids] == expected
            assert (output.num_cached_tokens >= 512) == (index > 0)


# ---- configs


def test_published_configs_mean_the_same(tmp_path: Path) -> None:
    """They name the heads of layers with full attention in two fields, Transformers 5.24 for each layer."""
    make_checkpoint(tmp_path, "gemma4", **LARGE)
    network = load_network_config(tmp_path).network
    assert "per_layer_config" in json.loads((tmp_path / "config.json").read_text())
    edit_config(tmp_path, per_layer_config=..., global_head_dim=32, num_global_key_value_heads=1)
    assert load_network_config(tmp_path).network == network
    edit_config(tmp_path, rope_parameters=..., layer_types=..., use_bidirectional_attention="vision")
    defaults = load_network_config(tmp_path).network
    assert defaults.ropes == (RopeSpec(), RopeSpec("proportional", 1e6, rotated_pairs=4))
    assert defaults.kv_windows == (20,) * 5 + (None,)


def test_ranks_that_would_differ_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gemma4", **LARGE)
    config = load_network_config(tmp_path)
    assert "heads, and of its KV heads, 4 or 1; take another number of ranks" in refusal(
        lambda: config.of_ranks(3), ConfigError
    )


@pytest.mark.parametrize("name", ["small", "mixture"])
def test_ranks_hold_what_is_planned(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gemma4", **MODELS[name])
    config = load_network_config(tmp_path)
    cpu = torch.device("cpu")
    parts = [load_model(tmp_path, config, torch.float32, cpu, group=MetaRanks(rank, 2)) for rank in range(2)]
    for part in parts:
        held = sum(slot.view.nbytes for _, slot in part.slots())
        assert part.network.weight_bytes == held < config.network.weight_bytes
        assert dict(part.tensors()).keys() == dict(part.slots()).keys()


# ---- sizes of what Google publishes


PUBLISHED: dict[str, dict[str, Any]] = {
    "E2B": {
        **{"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8},
        **{"num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True},
        **{"layer_types": ([SLIDING] * 4 + [FULL]) * 7},
    },
    "31B": {
        **{"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32},
        **{"num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True},
        **{"layer_types": ([SLIDING] * 5 + [FULL]) * 10, "sliding_window": 1024, "hidden_size_per_layer_input": 0},
        "max_position_embeddings": 262_144,
    },
    "26B-A4B": {
        **{"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16},
        **{"num_key_value_heads": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
        **{"layer_types": ([SLIDING] * 5 + [FULL]) * 5, "sliding_window": 1024, "hidden_size_per_layer_input": 0},
        **{"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    },
}


@pytest.mark.parametrize(
    ("name", "weights", "token_bytes", "sizes", "gib_of_128k"),
    [
        ("E2B", 4.6e9, 12 * 1024 + 3 * 2048, {256, 512}, 0.86),
        ("31B", 30.7e9, 50 * 16384 + 10 * 8192, {256, 512}, 17.3),
        ("26B-A4B", 25.2e9, 25 * 8192 + 5 * 4096, {256, 512}, 4.5),
    ],
)
def test_sizes_of_published_models(
    name: str, weights: float, token_bytes: int, sizes: set[int], gib_of_128k: float, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    fields = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "dtype": "bfloat16"}
    config.write_text(json.dumps({**fields, **PUBLISHED[name]}))
    network = read_network_config(config).network
    assert network.weight_bytes == pytest.approx(2 * weights, rel=0.02)
    layout = layout_of(EngineConfig(model=str(tmp_path)), network)
    assert layout.token_bytes == token_bytes
    assert {group.block_size for group in layout.groups} == sizes
    held = layout.groups.most_blocks(131_072, 8192) * layout.block_bytes / 2**30
    assert layout.held_bytes(131_072, 8192) / 2**30 < held < gib_of_128k


# ---- the text model of one for images and sounds too


def test_text_is_continued_as_by_the_text_model_of_a_unified_one(tmp_path: Path) -> None:
    """Like 12B: without towers, and without inputs of each layer, of which its config says nothing."""
    make_checkpoint(tmp_path / "text", "gemma4", **LARGE)
    fields = json.loads((tmp_path / "text" / "config.json").read_text())
    absent = ("model_type", "architectures", "hidden_size_per_layer_input", "vocab_size_per_layer_input")
    own = {name: value for name, value in fields.items() if name not in absent}
    text = Gemma4UnifiedTextConfig(**{**own, "pad_token_id": 0})
    vision = {"patch_size": 4, "pooling_kernel_size": 1, "mm_embed_dim": 32, "mm_posemb_size": 16}
    config = Gemma4UnifiedConfig(text_config=text, vision_config=vision, audio_config=None)
    model = Gemma4UnifiedForConditionalGeneration(config).eval()
    state = load_file(tmp_path / "text" / "model.safetensors")
    model.model.language_model.load_state_dict({name.removeprefix("model."): each for name, each in state.items()})
    model.save_pretrained(tmp_path / "whole")
    saved = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert saved["text_config"]["model_type"] == "gemma4_unified_text"
    assert not saved["text_config"].keys() & {"hidden_size_per_layer_input", "vocab_size_per_layer_input"}
    assert any(name.startswith("model.vision_embedder.") for name in load_file(tmp_path / "whole/model.safetensors"))
    prompt = random_prompt(50, VOCAB, seed=1)
    expected = model(torch.tensor([prompt])).logits[0, -1]
    with LLM(tmp_path / "whole", dtype="float32", **RESIDENT) as llm:
        ((_, row), *_) = logits_by_request(llm, [prompt], 1).items()
    torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
    edit_config(tmp_path / "whole", text_config={})
    network = load_network_config(tmp_path / "whole").network
    default = Gemma4UnifiedTextConfig()
    assert (network.kv_windows[0], network.max_model_len) == (default.sliding_window, 262_144)


def test_text_is_continued_as_by_the_text_model(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "text", "gemma4", **SMALL)
    text = Gemma4TextConfig.from_pretrained(tmp_path / "text")
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64}
    config = Gemma4Config(text_config=text, vision_config={**vision, **sizes}, audio_config=None)
    model = Gemma4ForConditionalGeneration(config)
    state = load_file(tmp_path / "text" / "model.safetensors")
    language = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    model.model.language_model.load_state_dict(language)
    model.save_pretrained(tmp_path / "whole")
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    assert any(name.startswith("model.vision_tower.") for name in stored)
    # Published checkpoints also have projections that nothing reads.
    prefix = "model.language_model.layers.6.self_attn."
    unused = {f"{prefix}{name}.weight": torch.ones(4, 4) for name in ("k_proj", "v_proj")}
    save_file({**stored, **unused}, tmp_path / "whole" / "model.safetensors", {"format": "pt"})
    assert load_network_config(tmp_path / "whole").network == load_network_config(tmp_path / "text").network
    prompt = random_prompt(50, VOCAB, seed=1)
    found = []
    for path in (tmp_path / "whole", tmp_path / "text"):
        with LLM(path, dtype="float32", **RESIDENT) as llm:
            found.append(logits_by_request(llm, [prompt], 5))
    assert all(torch.equal(row, found[1][key]) for key, row in found[0].items())
