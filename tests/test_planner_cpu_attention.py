"""CPU attention in the plan: its share, its time, the transfers that it saves, and how it is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from engines import greedy, offloaded, random_prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import GIB, RATES, sizing_for

from nanovllm import LLM
from nanovllm.features.cpu_attention.shares import (
    Bandwidths,
    HostRead,
    LayerLoad,
    blocks_for_cpu_attention,
    layer_seconds,
)
from nanovllm.features.planner.machine import Link, Rates
from nanovllm.features.planner.network import CpuAttentionModel, Network
from nanovllm.features.planner.plan import make_plan
from nanovllm.features.planner.predict import DEVICE, FIXED, HOST, LINK, KVPlacement, StepModel
from nanovllm.memory.budget import blocks_of_share, predict_transfers
from nanovllm.memory.layout import KVLayout
from nanovllm.models.hf_config import load_decoder_spec
from nanovllm.models.spec import DecoderSpec

BLOCK, VOCAB, LAYERS = 16, 97, 3
CPU_ATTENTION_RATES = replace(RATES, weight_bandwidth=4e8, host_bandwidth=2e6, link=Link(1e6, 1e6))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab=VOCAB, layers=LAYERS)
    return path


@pytest.fixture(scope="module")
def spec(model_dir: Path) -> DecoderSpec:
    return load_decoder_spec(model_dir)


def step_model(spec: DecoderSpec, rates: Rates, *, one_processor: bool = False) -> StepModel:
    placement = KVPlacement(BLOCK, 2, 4, cpu_attention=True, one_processor=one_processor)
    return StepModel(Network(spec, "float32"), placement, rates)


# ---- its share


@given(
    context=st.integers(0, 400), window=st.none() | st.integers(1, 300), resident=st.integers(0, 9),
    weights=st.integers(0, 10**6), link=st.floats(1e4, 1e9), host=st.floats(1e4, 1e9), device=st.floats(1e4, 1e9),
    one_processor=st.booleans(),
)  # fmt: skip
@settings(max_examples=300)
def test_the_share_is_the_one_that_the_engine_takes(
    context: int, window: int | None, resident: int, weights: int, link: float, host: float, device: float,
    one_processor: bool,
) -> None:  # fmt: skip
    """Block by block, as the engine counts them."""
    layout, rates = KVLayout(3, 2, 16, BLOCK, 4), Bandwidths(link, host, device, one_processor=one_processor)
    use = CpuAttentionModel(rates, weights, 8).use(layout, resident, context, window)
    first = 0 if window is None else max(0, context - window + 1) // BLOCK
    stored = {index: min(BLOCK, context - index * BLOCK) for index in range(first, -(-context // BLOCK))}
    token = layout.token_layer_bytes
    reads = [HostRead(size * token) for index, size in stored.items() if index >= resident and size == BLOCK]
    tail = sum(size for index, size in stored.items() if index >= resident and size < BLOCK) * token
    on_device = sum(size for index, size in stored.items() if index < resident) * token + tail
    taken = blocks_for_cpu_attention(LayerLoad(reads, tail, on_device, weights), rates)
    planned = blocks_of_share(len(reads), use.share)

    def seconds(blocks: int) -> float:
        cpu_attention, all_reads = blocks * BLOCK * token, len(reads) * BLOCK * token
        return layer_seconds(
            tail + all_reads - cpu_attention, cpu_attention, on_device + all_reads - cpu_attention, weights, rates
        )

    # The same number, but where rounding decides between two that are equally good.
    assert planned == taken or seconds(planned) == pytest.approx(seconds(taken), rel=1e-12)
    moved = predict_transfers(layout, resident, context, 1, window, use)
    assert moved.cpu_attention_blocks == 3 * planned
    assert moved.without_cpu_attention == predict_transfers(layout, resident, context, 1, window)


def test_one_processor_leaves_every_whole_block_where_it_is(spec: DecoderSpec) -> None:
    """Whether its rates are known or not."""
    for rates in (Rates(), RATES, CPU_ATTENTION_RATES):
        moved = step_model(spec, rates, one_processor=True).transfers(100, 1)
        assert (
            moved.cpu_attention_blocks == LAYERS * 4 and moved.h2d_copies == LAYERS
        )  # blocks 2 to 5, and the last one's tokens


@pytest.mark.parametrize("chunk", [7, 33])
def test_the_engine_leaves_to_the_cpu_what_the_plan_says(model_dir: Path, chunk: int) -> None:
    """Chunks of few tokens share too; what goes layer by layer does not."""
    with LLM(model_dir, **offloaded(BLOCK, 5, 40, max_num_batched_tokens=chunk)) as llm:
        request = llm.plan().request(150, 20)
        llm.generate(random_prompt(150, VOCAB, 1), greedy(20), use_tqdm=False)
        transfers = llm.kv_stats().transfers
    assert transfers == request.prefill_transfers + request.decode_transfers
    assert (
        request.cpu_attention_bytes == request.decode_transfers.cpu_attention_bytes / 19 > 0
        and request.no_cpu_attention == ()
    )


# ---- its time


def test_a_decode_step_shares_its_reading_out(spec: DecoderSpec) -> None:
    """98 tokens on the host, 6 full blocks and 2 tokens: at twice the link's rate the CPU takes two thirds."""
    model = step_model(spec, CPU_ATTENTION_RATES)
    network, token = model.network, model.network.layout(BLOCK).token_bytes
    moved = model.transfers(2 * BLOCK + 98, 1)
    assert moved.cpu_attention_blocks == LAYERS * 4 and moved.cpu_attention_bytes == 4 * BLOCK * token
    weights = LAYERS * network.layer_weight_bytes / 4e8
    device = weights + (2 * BLOCK + 98 + 1 - 4 * BLOCK) * token / 4e8
    cpu_attention, copying = 4 * BLOCK * token / 2e6, (98 - 4 * BLOCK) * token / 1e6
    head, fixed = VOCAB * spec.hidden_size * 4 / 2e9, 1e-3 + LAYERS * 1e-4 + LAYERS * 3 * 1e-5
    step = model.decode(2 * BLOCK + 98)
    assert step.terms == pytest.approx({DEVICE: device + head, HOST: cpu_attention, LINK: copying, FIXED: fixed})
    assert step.seconds == pytest.approx(max(weights + cpu_attention, copying) + head + fixed)
    assert step.seconds < (step_model(spec, replace(CPU_ATTENTION_RATES, host_bandwidth=None)).decode(130).seconds or 0)


def test_one_processor_reads_in_turn(spec: DecoderSpec) -> None:
    model = step_model(
        spec, replace(CPU_ATTENTION_RATES, link=Link(1e6, 1e6, duplex=False, overlap=0.0)), one_processor=True
    )
    moved = model.transfers(100, 1)
    step = model.decode(100)
    assert step.seconds == pytest.approx(sum(step.terms.values()))
    assert step.terms[HOST] == pytest.approx(moved.cpu_attention_bytes / 2e6) and step.limit == HOST


def test_cpu_attention_is_left_out_if_its_rate_is_not_given(spec: DecoderSpec) -> None:
    for rate in ("link", "host_bandwidth", "device_bandwidth"):
        rates = replace(CPU_ATTENTION_RATES, **{rate: None})
        model = step_model(spec, rates)
        assert model.no_cpu_attention == (rate,)
        without = replace(model, placement=replace(model.placement, cpu_attention=False))
        assert model.transfers(130, 1) == without.transfers(130, 1) and model.decode(130) == without.decode(130)
        assert step_model(spec, rates, one_processor=True).no_cpu_attention == ()


@given(
    prompt=st.integers(1, 250), times=st.integers(0, 2), chunk=st.integers(1, 9), one_processor=st.booleans(),
    name=st.sampled_from(["compute", "attention", "weight_bandwidth", "head_bandwidth", "host_bandwidth"]),
)  # fmt: skip
@settings(max_examples=60)
def test_longer_prompts_take_longer_and_faster_machines_do_not(
    spec: DecoderSpec, prompt: int, times: int, chunk: int, one_processor: bool, name: str
) -> None:
    """Longer by whole blocks and chunks: a block that is full need not stream, where its last tokens did."""
    network = Network(replace(spec, max_position_embeddings=1000), "float32")
    arguments = offloaded(BLOCK, 5, 40, max_num_batched_tokens=chunk)
    sizing = sizing_for(network, 8 * GIB, 8 * GIB, one_memory=one_processor, **arguments)
    plan = make_plan(network, sizing, CPU_ATTENTION_RATES)
    short, long = plan.request(prompt, 5), plan.request(prompt + times * chunk * BLOCK, 5)
    faster = make_plan(
        network, sizing, replace(CPU_ATTENTION_RATES, **{name: 2 * getattr(CPU_ATTENTION_RATES, name)})
    ).request(prompt, 5)
    for phase in ("prefill", "decode"):
        seconds, more, less = (getattr(request, phase).seconds for request in (short, long, faster))
        assert less * (1 - 1e-9) <= seconds <= more * (1 + 1e-9)
    assert (short.cpu_attention_bytes or 0) <= (long.cpu_attention_bytes or 0)
