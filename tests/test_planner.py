"""The plan against what the engine then allocates, moves and accepts, and its arithmetic against counts by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint_fixture, make_checkpoint
from engines import greedy, offloaded, random_prompt
from fast import fast_only
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from plans import RATES, parameter_bytes

from benchmarks.transfers import CpuAttentionUse, predict_transfers
from nanovllm import LLM
from nanovllm.data.batch import Batch, LayerwisePrefill, StepResult
from nanovllm.data.kv_groups import HOLE
from nanovllm.data.network import ExpertSpec, KVLayer, Network
from nanovllm.engine import branch_points
from nanovllm.errors import RequestError
from nanovllm.features.planner.predict import COMPUTE, DEVICE, DISK, HOST, LINK, Rates, StepModel
from nanovllm.features.planner.step_work import StepWork
from nanovllm.features.recurrent import states as recurrent_states
from nanovllm.features.streamed_weights.expert_cache import UsedMost
from nanovllm.memory.budget import TransferCount
from nanovllm.memory.layerwise import prefill_steps
from nanovllm.memory.layout import kv_layout
from nanovllm.memory.weights import WeightPlan
from nanovllm.models.hf_config import load_network_config

BLOCK = 16
VOCAB = 97
LAYERS = 3
MAX_LEN = 256


model_dir = checkpoint_fixture(vocab=VOCAB, layers=LAYERS, max_positions=MAX_LEN)


@pytest.fixture(scope="module")
def network(model_dir: Path) -> Network:
    return load_network_config(model_dir).on_meta("float32").network


# ---- bytes and counts of the engine


KINDS = ["sliding_attention", "full_attention", "full_attention"]
WINDOWS: dict[str, dict[str, Any]] = {
    "none": {"family": "qwen3"},
    "in all layers": {"family": "mistral", "sliding_window": 40},
    "in some layers": {"family": "qwen3", "sliding_window": 23, "max_window_layers": 1},
    "with smaller heads": {"family": "gemma4", "sliding_window": 23, "layer_types": KINDS},
    "and shared K and V": {"family": "gemma4", "sliding_window": 23, "layer_types": KINDS, "num_kv_shared_layers": 1},
    "of gpt-oss": {"family": "gpt_oss", "sliding_window": 23},
    "states instead": {"family": "qwen3_5"},
}
FAST_WINDOWS = ("none", "with smaller heads", "states instead")


@pytest.mark.parametrize("windows", fast_only(FAST_WINDOWS, WINDOWS))
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    prompt_len=st.integers(1, 200),
    output_len=st.integers(1, 20),
    num_gpu_blocks=st.integers(4, 9),
    chunk=st.integers(5, 100),
    cpu_attention=st.booleans(),
)
@example(prompt_len=190, output_len=4, num_gpu_blocks=4, chunk=70, cpu_attention=False)  # snapshots go to the host
@example(prompt_len=150, output_len=20, num_gpu_blocks=5, chunk=7, cpu_attention=True)  # chunks of few tokens share
def test_the_engine_allocates_and_moves_what_the_plan_says(
    tmp_path_factory: pytest.TempPathFactory,
    windows: str,
    prompt_len: int,
    output_len: int,
    num_gpu_blocks: int,
    chunk: int,
    cpu_attention: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / f"windows-{windows}"
    if not path.exists():
        make_checkpoint(path, vocab=VOCAB, layers=LAYERS, **WINDOWS[windows])
    sizes = {"num_gpu_blocks": num_gpu_blocks, "num_cpu_blocks": 40, "max_num_batched_tokens": chunk, "max_num_seqs": 1}
    with (
        pytest.MonkeyPatch.context() as patch,
        LLM(path, **offloaded(BLOCK, **sizes, cpu_attention=cpu_attention)) as llm,
    ):
        patch.setattr(branch_points, "LEAST_INTERVAL", 2 * BLOCK)
        patch.setattr(recurrent_states, "SHARE_OF_PROMPT", 1)
        plan = llm.plan()
        request = plan.request(prompt_len, output_len)
        llm.generate(random_prompt(prompt_len, VOCAB, 1), greedy(output_len), use_tqdm=False)
        stats = llm.kv_stats()
        assert stats.transfers == request.prefill_transfers + request.decode_transfers
        assert (stats.device_bytes, stats.host_bytes) == (plan.device_kv_bytes, plan.host_kv_bytes)
        assert plan.network.weight_bytes == parameter_bytes(llm._runner.model)
        steps = plan._steps(plan._step_model, prompt_len, output_len).steps
    if output_len > 1:
        for name in ("h2d_bytes", "d2h_bytes", "cpu_attention_bytes"):
            assert getattr(request.step_transfers, name) == getattr(request.decode_transfers, name) // (output_len - 1)
    assert cpu_attention or not stats.transfers.cpu_attention_blocks
    prefills = [step for step, _ in steps if step.begin < prompt_len]
    assert request.layer_by_layer == sum(step.end - step.begin for step in prefills if step.num_chunks > 1)
    if windows == "none":
        resident = plan.kv.split.resident_blocks
        layerwise_memory = plan.kv.layerwise_memory
        by_formula = prefill_steps(BLOCK, resident, prompt_len, chunk, layerwise_memory)
        assert [(step.begin, step.end) for step in prefills] == [(step.begin, step.end) for step in by_formula]


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"kvcache_block_size": BLOCK, "num_gpu_blocks": 60},
        {"kvcache_block_size": BLOCK, "num_gpu_blocks": 60, "enable_prefix_caching": False},
        offloaded(BLOCK, 9, 60),
    ],
    ids=["resident", "without prefix cache", "offloaded"],
)
def test_the_most_kv_of_a_prompt_is_what_the_run_holds(
    tmp_path: Path, family: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind windows blocks are held until the step of a chunk has ended: counted in the block tables of all steps."""
    make_checkpoint(tmp_path / "model", family, vocab=VOCAB, layers=LAYERS, sliding_window=23)
    with LLM(tmp_path / "model", **arguments, max_num_batched_tokens=70, max_num_seqs=1) as llm:
        held: list[int] = []
        execute = llm.engine.executor.execute

        def counting(batch: Batch) -> StepResult:
            tables = [table for seq in batch.sequences for table in seq.block_tables]
            held.append(len({block for table in tables for block in table if block != HOLE}))
            return execute(batch)

        monkeypatch.setattr(llm.engine.executor, "execute", counting)
        request = llm.plan().request(200, 6)
        llm.generate(random_prompt(200, VOCAB, 1), greedy(6), use_tqdm=False)
        stats = llm.kv_stats()
    assert stats.most_used_blocks == max(held) and stats.most_used_device_blocks <= stats.resident_blocks
    assert request.most_kv_bytes == max(held) * stats.bytes_per_block
    assert request.kv_bytes <= request.num_blocks * stats.bytes_per_block == held[-1] * stats.bytes_per_block
    assert max(held) > held[-1], "a chunk takes more than what is left at the end"


def test_a_request_without_offload_moves_nothing_and_takes_whole_blocks(model_dir: Path) -> None:
    with LLM(model_dir, num_gpu_blocks=12, kvcache_block_size=BLOCK) as llm:
        plan = llm.plan()
        request = plan.request(50, 8)
        (output,) = llm.generate(random_prompt(50, VOCAB, 1), greedy(8), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8
        assert llm.kv_stats().device_bytes == plan.device_kv_bytes and plan.host_kv_bytes == 0
    assert request.num_blocks == -(-57 // BLOCK)
    assert request.kv_bytes == request.resident_bytes == 57 * LAYERS * 2 * 2 * 16 * 4
    assert request.streamed_bytes == 0
    assert request.prefill_transfers + request.decode_transfers == TransferCount()


@given(
    context=st.integers(0, 60), query=st.integers(1, 50), windows=st.lists(st.none() | st.integers(1, 70), min_size=1)
)
@settings(max_examples=50)
def test_operations_of_attention_are_those_of_a_walk(
    network: Network, context: int, query: int, windows: list[int | None]
) -> None:
    kept = network.layers[0]
    assert isinstance(kept, KVLayer)
    network = replace(network, layers=tuple(replace(kept, window=window) for window in windows))
    work = StepWork(network, kv_layout(network, "auto").with_block_size(BLOCK))
    rows = range(context, context + query)
    keys = sum(min(p + 1, w or p + 1) for w in windows for p in rows)
    assert work.attention_operations(context, query) == 4 * network.num_heads * kept.head_dim * keys
    seen = [{k for p in rows for k in range(max(0, p + 1 - (w or p + 1)), p + 1)} for w in windows]
    token_layer = 2 * kept.heads * kept.head_dim * 4
    assert work.attended_bytes(context, query) == sum(map(len, seen)) * token_layer


@pytest.mark.parametrize(("products", "tokens"), [(False, 20), (True, 100)])
@pytest.mark.parametrize("part", ["30%", "70%"])
def test_weights_are_copied_once_a_pass(tmp_path: Path, part: str, products: bool, tokens: int) -> None:
    """And at the end the first layers of the next pass, which are copied behind the last ones. tokens: of a step."""
    make_checkpoint(tmp_path, vocab=VOCAB, layers=6)
    sizes = {"weights_memory_bytes": part, "max_num_batched_tokens": tokens, "host_products": products}
    with LLM(tmp_path, **offloaded(BLOCK, 9, 40, **sizes)) as llm:
        plan = llm.plan()
        assert plan.weights.streamed and not llm.kv_stats().loaded_weight_bytes
        request = plan.request(2 * tokens + 10, 6)
        llm.generate(random_prompt(2 * tokens + 10, VOCAB, 1), greedy(6), use_tqdm=False)
        loaded = llm.kv_stats().loaded_weight_bytes
    assert llm.kv_stats().loaded_weight_bytes == loaded
    predicted = request.prefill_weight_bytes + 5 * request.step_weight_bytes
    assert request.step_weight_bytes == (0 if products else plan.weights.host_bytes)
    assert request.step_multiplied_bytes == (plan.weights.host_bytes if products else 0)
    ahead = [sum(plan.weights.sizes.stored_bytes[layer] for layer in plan.weights.streamed[:most]) for most in (1, 2)]
    assert loaded - predicted in ahead


# ---- the longest prompt

TOO_SMALL: dict[str, dict[str, Any]] = {
    "offload": offloaded(BLOCK, 5, 7),
    "offload, one block left": offloaded(BLOCK, 4, 13),
    "no offload": {"num_gpu_blocks": 6, "kvcache_block_size": BLOCK},
    "no offload, default blocks": {"num_gpu_blocks": 4},
    "a limit by name": {"max_model_len": 60},
    "a limit and a small cache": offloaded(BLOCK, 5, 7, max_model_len=60),
}


def accepts(llm: LLM, tokens: int) -> bool:
    try:
        llm.generate(random_prompt(tokens, VOCAB, 1), greedy(1), use_tqdm=False)
    except RequestError as error:
        assert f"the prompt has {tokens} tokens" in str(error)
        return False
    return True


@pytest.mark.parametrize("case", TOO_SMALL)
def test_the_longest_prompt_is_accepted_and_one_token_more_is_not(model_dir: Path, case: str) -> None:
    with LLM(model_dir, **TOO_SMALL[case]) as llm:
        plan = llm.plan()
        longest = plan.kv.max_model_len
        assert plan.fits(longest) and not plan.fits(longest + 1)
        with pytest.raises(RequestError, match=f"prompt_len={longest + 1}, .*: plan 1 to {longest} tokens in"):
            plan.request(longest + 1, 1)
        assert accepts(llm, longest) and not accepts(llm, longest + 1)
        by_name = "max_model_len" if "limit" in case else "KV memory"
        assert plan.sizing.longest_limit(plan.kv) == ("positions" if longest == MAX_LEN else by_name)


def test_a_refusal_names_sizes_and_the_arguments_that_decide(model_dir: Path) -> None:
    wanted = random_prompt(MAX_LEN, VOCAB, 1)
    for case, names in (
        ("offload", ("7 on the host", "num_cpu_blocks or num_gpu_blocks", "int8")),
        ("no offload", ("6 blocks of 16 tokens", "enable_cpu_offload=True", "num_gpu_blocks")),
        ("a limit by name", ("raise max_model_len",)),
    ):
        with LLM(model_dir, **TOO_SMALL[case]) as llm, pytest.raises(RequestError) as refusal:
            llm.generate(wanted, greedy(1), use_tqdm=False)
        for name in (*names, "as things are, prompts of up to"):
            assert name in str(refusal.value), case


def test_a_refusal_names_the_yarn_that_extends_the_positions(model_dir: Path) -> None:
    arguments: dict[str, Any] = {"num_gpu_blocks": 80, "kvcache_block_size": BLOCK}
    wanted = random_prompt(2 * MAX_LEN + 1, VOCAB, 1)
    with LLM(model_dir, **arguments) as llm:
        with pytest.raises(RequestError, match="document no RoPE scaling"):
            llm.generate(random_prompt(4 * MAX_LEN + 1, VOCAB, 1), greedy(1), use_tqdm=False)
        with pytest.raises(RequestError, match=r"positions end at 256, .* extend them at some cost") as refusal:
            llm.generate(wanted, greedy(1), use_tqdm=False)
    rope = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": MAX_LEN}
    overrides = {"rope_parameters": rope}
    assert f"hf_overrides={overrides!r}" in str(refusal.value)
    with LLM(model_dir, **arguments, hf_overrides=overrides) as llm:
        assert accepts(llm, len(wanted))


# ---- time

CHUNK = LayerwisePrefill(100, 140, 40)
RESIDENT = 2  # blocks


def step_model(
    network: Network, rates: Rates, cpu_attention: bool = False, streamed: tuple[int, ...] = ()
) -> StepModel:
    layout = kv_layout(network, "auto").with_block_size(BLOCK)
    weights = WeightPlan(network.weights, streamed)
    return StepModel(network, rates, layout, ring_slots=4, weights=weights, cpu_attention=cpu_attention)


def moves_of(model: StepModel, context_len: int, query_len: int = 1) -> TransferCount:
    """What a step moves by the formula, with the best share of CPU attention."""
    layout = model.layout
    use = None
    if model.can_share(query_len):
        stored = min(context_len, RESIDENT * BLOCK)
        token = layout.token_layer_bytes
        share = model.share_of((context_len - stored) * token, stored * token, layout.block_layer_bytes)
        use = CpuAttentionUse(share, query_len)
    return predict_transfers(layout, RESIDENT, context_len, query_len, use)


def test_a_prefill_chunk_is_the_longer_of_computing_and_copying(network: Network) -> None:
    model = step_model(network, RATES)
    work = StepWork(network, model.layout)
    matrices = max(work.matrix_operations(40) / 1e9, LAYERS * network.layer_weight_bytes() / 4e8)
    computing = matrices + work.attention_operations(100, 40) / 1e9
    token = model.layout.token_bytes
    copying = max((100 - 2 * BLOCK) * token, 40 * token) / 1e8
    stall = max(0.0, matrices - LAYERS * 4 * BLOCK * token / LAYERS / 1e8)
    chunk = model.prefill(CHUNK, False, moves_of(model, 100, 40))
    assert chunk.seconds == pytest.approx(max(computing, copying + stall))
    assert chunk.terms == pytest.approx({COMPUTE: computing, LINK: copying})
    last = model.prefill(CHUNK, True, moves_of(model, 100, 40))
    assert last.seconds == pytest.approx(chunk.seconds + VOCAB * network.hidden_size * 4 / 4e8)


def test_a_decode_step_reads_while_the_link_copies(network: Network) -> None:
    model = step_model(network, RATES)
    token = model.layout.token_bytes
    weights = LAYERS * network.layer_weight_bytes() / 4e8
    device = weights + 101 * token / 4e8
    copying = (100 - 2 * BLOCK) * token / 1e8
    stall = max(0.0, weights + (2 * BLOCK + 1) * token / 4e8 - LAYERS * 4 * BLOCK * token / LAYERS / 1e8)
    head = VOCAB * network.hidden_size * 4 / 4e8
    step = model.decode(100, moves_of(model, 100))
    assert step.seconds == pytest.approx(max(device, copying + stall) + head)
    assert step.terms == pytest.approx({DEVICE: device + head, LINK: copying})
    assert step.limit == max(step.terms, key=lambda name: step.terms[name])


def test_what_the_cpu_attends_to_is_neither_copied_nor_read_by_the_device(network: Network) -> None:
    fast = replace(RATES, device_bandwidth=1e12, host_bandwidth=2e8)
    model = step_model(network, fast, cpu_attention=True)
    moved = moves_of(model, 1000)
    step = model.decode(1000, moved)
    assert 0 < moved.cpu_attention_bytes < moved.without_cpu_attention.h2d_bytes
    assert step.terms[HOST] == pytest.approx(moved.cpu_attention_bytes / 2e8)
    assert step.terms[LINK] == pytest.approx(moved.h2d_bytes / 1e8)
    assert step.seconds is not None and 0.5 < step.terms[HOST] / step.seconds <= 1.0
    alone = step_model(network, replace(fast, host_bandwidth=None), cpu_attention=True)
    assert alone.no_cpu_attention == ("host_bandwidth",) and moves_of(alone, 1000).cpu_attention_blocks == 0


def test_weights_that_stream_share_the_link_with_kv(network: Network) -> None:
    """Two of three layers, once a pass."""
    rates = replace(RATES, compute=1e12, device_bandwidth=1e12)
    model = step_model(network, rates, streamed=(0, 2))
    loaded = network.weights.stored_bytes[0] + network.weights.stored_bytes[2]
    moved = moves_of(model, 100)
    step = model.decode(100, moved)
    link = (moved.h2d_bytes + loaded) / 1e8
    assert step.limit == LINK and step.terms[LINK] == pytest.approx(step.seconds) == pytest.approx(link)
    chunk = model.prefill(CHUNK, False, moves_of(model, 100, 40))
    layers = model.prefill(LayerwisePrefill(100, 220, 40), False, moves_of(model, 100, 120))
    token = model.layout.token_bytes
    stored = (100 - 2 * BLOCK) * token
    assert chunk.terms[LINK] == pytest.approx((stored + loaded) / 1e8)
    assert layers.terms[LINK] == pytest.approx((stored + loaded) / 1e8), "three chunks layer by layer, and one copy"
    slow = step_model(network, replace(rates, device_bandwidth=1e3), streamed=(0, 2)).decode(100, moved)
    resident = step_model(network, replace(rates, device_bandwidth=1e3)).decode(100, moved)
    assert slow.seconds == resident.seconds, "they hide behind computation"


def test_weights_that_are_read_from_disk_take_its_time(network: Network) -> None:
    """Two of three layers stream, one of them from disk."""
    rates = replace(RATES, compute=1e12, device_bandwidth=1e12)
    model = step_model(network, rates, streamed=(0, 2))
    model = replace(model, weights=replace(model.weights, on_disk=(2,)))
    assert model.decode(100, moves_of(model, 100)).missing == ("disk_bandwidth",)
    model = replace(model, rates=replace(rates, disk_bandwidth=2e6))
    read = network.weights.stored_bytes[2] / 2e6
    step = model.decode(100, moves_of(model, 100))
    assert step.limit == DISK and step.terms[DISK] == pytest.approx(step.seconds) == pytest.approx(read)
    chunks = model.prefill(LayerwisePrefill(100, 220, 40), False, moves_of(model, 100, 120))
    assert chunks.terms[DISK] == pytest.approx(read), "once for three chunks layer by layer"
    fast = replace(model, rates=replace(rates, disk_bandwidth=1e12)).decode(100, moves_of(model, 100))
    assert fast.seconds == step_model(network, rates, streamed=(0, 2)).decode(100, moves_of(model, 100)).seconds


def test_a_token_copies_the_experts_that_it_chooses(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe", vocab=VOCAB, layers=LAYERS)
    network = load_network_config(tmp_path).on_meta("float32").network
    assert network.experts is not None
    model = step_model(network, replace(RATES, device_bandwidth=1e12), streamed=(0, 2))
    assert model.loaded_weights(1) == model.loaded_weights(1000) == model.weights.host_bytes, "it has no cache"
    spec = network.experts
    number = 2 * spec.num_experts
    expert = network.weights.stored_expert_bytes[0] // spec.num_experts
    assert model.weights.num_streamed_experts == number and model.weights.host_bytes == number * expert
    chosen = 2 * spec.num_experts_per_tok
    cached = replace(model, weights=replace(model.weights, cached_experts=chosen))
    misses = chosen * (1 - chosen / number) * expert
    assert cached.loaded_weights(1) == pytest.approx(misses, abs=1)
    small = replace(model, weights=replace(model.weights, cached_experts=chosen - 1))
    assert small.loaded_weights(1) == pytest.approx(chosen * (1 - (chosen - 1) / number) * expert, abs=1)
    assert cached.loaded_weights(1000) == number * expert, "many rows choose all of them"
    waiting = cached.decode(10, TransferCount()).seconds
    ready = replace(model, weights=WeightPlan(network.weights)).decode(10, TransferCount()).seconds
    assert waiting is not None and ready is not None
    assert waiting - ready == pytest.approx(misses / 1e8, abs=1e-8), "the device waits for them behind each router"
    places = number // 4
    on_disk = replace(cached.weights, on_disk=(0, 2), host_experts=places)
    disk = replace(cached, weights=on_disk, rates=replace(cached.rates, disk_bandwidth=1e7))
    longer = disk.decode(10, TransferCount()).seconds
    assert disk.read_weights(1) == pytest.approx(misses * (1 - places / number), abs=1) and longer is not None
    assert longer - waiting == pytest.approx(disk.read_weights(1) / 1e7, abs=1e-8), "and for the disk"


@pytest.mark.parametrize("places", [15, 16, 40, 70, 128, 200])
def test_even_choices_miss_the_cache_as_often_as_the_formula_says(network: Network, places: int) -> None:
    """Counted with the policy of the engine: 8 layers with 32 experts of 100 bytes, of which a token uses two."""
    spec = ExpertSpec(num_experts=32, num_experts_per_tok=2)
    sizes = replace(
        network.weights,
        stored_bytes=(3200,) * 8,
        stored_expert_bytes=(3200,) * 8,
        num_experts=spec.num_experts,
        experts_per_token=spec.num_experts_per_tok,
    )
    chosen = random.Random(places)
    cache = UsedMost(places)
    counts = []
    for _ in range(600):
        tokens = [[(layer, expert) for expert in chosen.sample(range(32), 2)] for layer in range(8)]
        counts.append(sum(len(cache.take(experts)[1]) for experts in tokens))
    weights = WeightPlan(sizes, tuple(range(8)), places)
    assert 100 * sum(counts[100:]) / 500 == pytest.approx(weights.chosen_bytes(1, spec), rel=0.04)


def test_an_unknown_rate_is_named(network: Network) -> None:
    model = step_model(network, Rates(compute=1e9))
    assert model.prefill(CHUNK, True, moves_of(model, 100, 40)).missing == ("device_bandwidth", "link")
    assert model.decode(10, TransferCount()).missing == ("device_bandwidth",)
    streaming = step_model(network, Rates(compute=1e9), streamed=(0, 1))
    assert streaming.decode(10, TransferCount()).missing == ("device_bandwidth", "link")
