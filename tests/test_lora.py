"""LoRA adapters in whole engines: bits, the prefix cache, beam search, files that change, memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from engines import greedy, greedy_reference, offloaded, random_prompt, recorded_batches, token_ids
from fast import fast_only
from graph_devices import PROMPTS, CapturingDevice, use_graphs
from graph_devices import arguments as graph_arguments
from lora_helpers import ALL, adapter_tensors, make_adapter, merge_adapter, write_adapter

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.lora_request import LoRARequest

VOCAB = 199
BLOCK = 16
RESIDENT = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 200}
TARGETS: list[tuple[str, ...]] = [ALL, ("q_proj", "v_proj"), ("o_proj", "gate_proj", "down_proj")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and three adapters of different modules and ranks, a0 to a2."""
    path = tmp_path_factory.mktemp("lora")
    model = make_checkpoint(path / "model", seed=3)
    for index, targets in enumerate(TARGETS):
        make_adapter(path / f"a{index}", model, index + 1, targets, rank=(8, 3, 5)[index])
    return path


def adapter(folder: Path, index: int) -> LoRARequest:
    return LoRARequest(f"a{index}", index + 1, str(folder / f"a{index}"))


def make_llm(folder: Path, **arguments: Any) -> LLM:
    others = {"dtype": "float32", "device": "cpu", "enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    return LLM(folder / "model", **{**others, **RESIDENT, **arguments})


def numbers(output: RequestOutput) -> list[Any]:
    """Tokens and log-probabilities, those of the prompt too, to the bit."""
    prompt = [
        {token: found.logprob for token, found in position.items()}
        for position in output.prompt_logprobs or ()
        if position
    ]
    sequences = [
        (
            seq.token_ids,
            [{token: found.logprob for token, found in position.items()} for position in seq.logprobs or ()],
        )
        for seq in output.outputs
    ]
    return [prompt, sequences]


LENGTHS = (5, 31, 16, 70, 90, 1, 47, 33, 8, 64, 130, 12)
MIXED = [
    (
        random_prompt(length, VOCAB, seed=2),
        SamplingParams(
            n=2 if index % 5 == 4 else 1,
            temperature=1.0 if index % 2 or index % 5 == 4 else 0.0,
            seed=index,
            max_tokens=10,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=1 if index % 3 == 0 else None,
        ),
        (index % 4) - 1,  # -1: the model alone
    )
    for index, length in enumerate(LENGTHS)
]
ENGINES: dict[str, dict[str, Any]] = {
    "all at once": {},
    "few adapters on the device, so that requests wait": {"max_loras": 1, "max_cpu_loras": 2},
    "few blocks": {"num_gpu_blocks": 14},
    "few blocks, swapped": {"num_gpu_blocks": 14, "preemption_mode": "swap", "swap_space": 0.01},
    "small steps": {"max_num_batched_tokens": 23, "max_num_seqs": 5},
    "offloaded, layer by layer": offloaded(BLOCK, 4, 120, max_num_batched_tokens=40),
    "offloaded, few blocks": offloaded(BLOCK, 6, 24, max_num_batched_tokens=33, cpu_attention=False),
}


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[Any]]:
    """What an engine computes for each request of MIXED when it runs alone."""
    with make_llm(folder) as llm:
        found = []
        for prompt, params, index in MIXED:
            lora_request = None if index < 0 else adapter(folder, index)
            found += llm.generate(prompt, params, use_tqdm=False, lora_request=lora_request)
            llm.reset_prefix_cache()
        return [numbers(output) for output in found]


@pytest.mark.parametrize(
    "name", fast_only(["few adapters on the device, so that requests wait", "offloaded, layer by layer"], ENGINES)
)
def test_a_request_has_the_same_bits_alone_and_among_others(name: str, folder: Path, alone: list[list[Any]]) -> None:
    requests = [None if index < 0 else adapter(folder, index) for _, _, index in MIXED]
    prompts = [prompt for prompt, _, _ in MIXED]
    params = [params for _, params, _ in MIXED]
    with make_llm(folder, **ENGINES[name]) as llm:
        for _ in range(2):  # then with a warm prefix cache
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
            assert [numbers(output) for output in outputs] == alone
        if "few blocks" in name:
            assert llm.engine.scheduler.preemption.stats.total > 0
        if "layer by layer" in name:
            assert llm.kv_stats().transfers.h2d_bytes > 0


def test_the_model_alone_computes_as_without_lora(folder: Path) -> None:
    prompts = [random_prompt(length, VOCAB, seed=5) for length in (3, 40)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
    with LLM(folder / "model", dtype="float32", device="cpu", **RESIDENT) as llm:
        expected = [numbers(output) for output in llm.generate(prompts, params, use_tqdm=False)]
    with make_llm(folder) as llm:
        lora_requests = [None, None, adapter(folder, 0), adapter(folder, 1)]
        outputs = llm.generate([*prompts, *prompts], params, use_tqdm=False, lora_request=lora_requests)
        assert [numbers(output) for output in outputs[:2]] == expected
        assert all(numbers(output) not in expected for output in outputs[2:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_are_near_the_merged_model(dtype: str, folder: Path, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "merged", seed=3)
    merge_adapter(model, folder / "a0")
    model.save_pretrained(tmp_path / "merged")
    prompt = random_prompt(60, VOCAB, seed=1)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with LLM(tmp_path / "merged", dtype="float32", device="cpu", **RESIDENT) as llm:
        (expected,) = llm.generate(prompt, params, use_tqdm=False)
    with make_llm(folder, dtype=dtype) as llm:
        (found,) = llm.generate(prompt, params, use_tqdm=False, lora_request=adapter(folder, 0))
    pairs = zip(numbers(found)[0], numbers(expected)[0], strict=True)
    errors = [abs(mine[token] - theirs[token]) for mine, theirs in pairs for token in theirs if token in mine]
    assert len(errors) == 59 and sum(errors) / len(errors) < (0.2 if dtype == "bfloat16" else 0.03)


@pytest.mark.parametrize(
    "family, targets",
    [
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("qwen3_moe", ALL[:4]),
        pytest.param("mixtral", ALL[:4], marks=pytest.mark.slow),
        pytest.param("glm4_moe", ALL, marks=pytest.mark.slow),
        pytest.param("olmo3", ALL, marks=pytest.mark.slow),
        pytest.param("gemma3", ALL, marks=pytest.mark.slow),
    ],
)
def test_merged_projections_and_experts(family: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """The projections of a Phi-3, and the attention and shared expert of a mixture; its experts take no adapters."""
    model = make_checkpoint(tmp_path / "model", family)
    mine = make_adapter(tmp_path / "a", model, 1, targets, rank=4, lora_alpha=4)
    prompt = random_prompt(40, VOCAB, seed=1)
    expected = [greedy_reference(model, prompt, 8)]
    merge_adapter(model, tmp_path / "a")
    expected.append(greedy_reference(model, prompt, 8))
    assert expected[0] != expected[1]
    with make_llm(tmp_path) as llm:
        outputs = llm.generate([prompt] * 2, greedy(8), use_tqdm=False, lora_request=[None, mine])
        assert [output.outputs[0].token_ids for output in outputs] == expected


def test_changed_files_are_another_adapter(folder: Path, tmp_path: Path) -> None:
    """Requests see what the files hold when they are added, and share no KV block with those before."""
    model = make_checkpoint(tmp_path / "model", seed=3)
    shutil.copytree(folder / "a0", tmp_path / "mine")
    prompt = random_prompt(40, VOCAB, seed=1)
    mine = LoRARequest("mine", 7, str(tmp_path / "mine"))
    with make_llm(folder, max_loras=1) as llm:
        first, other = (
            llm.generate(prompt, greedy(6), use_tqdm=False, lora_request=adapter(folder, index))[0] for index in (0, 1)
        )
        outputs = [llm.generate(prompt, greedy(6), use_tqdm=False, lora_request=mine)[0]]
        write_adapter(tmp_path / "mine", adapter_tensors(model, TARGETS[1], 3, seed=2), 3)  # a1
        outputs.append(llm.generate(prompt, greedy(6), use_tqdm=False, lora_request=mine)[0])
    assert [numbers(output) for output in outputs] == [numbers(first), numbers(other)]
    assert outputs[1].num_cached_tokens == 0


@pytest.mark.parametrize("offload", [False, True])
def test_files_that_vanish_end_their_requests_alone(folder: Path, tmp_path: Path, offload: bool) -> None:
    """The error has the reason, the others go on, and what was computed without the adapter is not cached."""
    shutil.copytree(folder / "a0", tmp_path / "mine")
    arguments = offloaded(BLOCK, 4, 60, max_num_batched_tokens=32) if offload else {}
    prompt = random_prompt(70, VOCAB, seed=1)
    other = random_prompt(20, VOCAB, seed=2)
    mine = LoRARequest("mine", 1, str(tmp_path / "mine"))
    with make_llm(folder, **arguments) as llm:
        expected = token_ids(llm, other, greedy(5))
        llm.engine.add_request("mine", prompt, greedy(5), lora_request=mine)
        llm.engine.add_request("other", other, greedy(5))
        (tmp_path / "mine" / "adapter_model.safetensors").rename(tmp_path / "away")
        finished: dict[str, RequestOutput] = {}
        while llm.engine.has_unfinished_requests():
            finished |= {output.request_id: output for output in llm.engine.step() if output.finished}
        assert finished["mine"].outputs[0].finish_reason == "error"
        assert "the adapter 'mine' cannot be loaded: " in str(finished["mine"].error)
        assert "has no adapter_model.safetensors" in str(finished["mine"].error)
        assert [finished["other"].outputs[0].token_ids] == expected
        (tmp_path / "away").rename(tmp_path / "mine" / "adapter_model.safetensors")  # with the same stamp
        (again,) = llm.generate(prompt, greedy(5), use_tqdm=False, lora_request=mine)
        assert again.num_cached_tokens == 0
        (copy,) = llm.generate(prompt, greedy(5), use_tqdm=False, lora_request=LoRARequest("a0", 2, str(folder / "a0")))
        assert again.outputs[0].token_ids == copy.outputs[0].token_ids


def test_steps_with_adapters_are_eager_where_others_are_replayed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded graph has no adapters in it."""
    arguments = {**graph_arguments("pieces, resident"), "max_model_len": 200}
    prompts = PROMPTS[:4]
    lora_requests = [adapter(folder, 0), None, adapter(folder, 1), None]
    params = [
        SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=1) for tokens in (9, 14, 5, 20)
    ]
    with make_llm(folder, **{**arguments, "enforce_eager": True}) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False, lora_request=lora_requests)
    device = CapturingDevice()
    use_graphs(monkeypatch, device)
    with make_llm(folder, **arguments) as llm:
        steps = recorded_batches(llm)
        found = llm.generate(prompts, params, use_tqdm=False, lora_request=lora_requests)
        batches = [batch.sequences for batch, _, _ in steps]
    decodes = [batch for batch in batches if all(len(seq.token_ids) == 1 for seq in batch)]
    plain = [batch for batch in decodes if all(seq.adapter is None for seq in batch)]
    assert 0 < len(plain) < len(decodes)
    assert device.replays == 3 * len(plain), "a graph for each of two layers and one for the end"
    assert list(map(numbers, found)) == list(map(numbers, expected))
