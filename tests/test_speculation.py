"""Speculative decoding: outputs are those without it, to the bit, whatever is drafted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint_fixture, make_checkpoint, refusal
from drafters import CheckedDrafter
from engines import offloaded, random_prompt, token_ids, watch_layerwise
from fast import fast_only
from gguf_files import WIDE, write_gguf
from lora_helpers import make_adapter
from safetensors.torch import load_file, save_file
from tokenizer_files import write_byte_level

from nanovllm import LLM, SamplingParams, build
from nanovllm.apps.server.protocol import SamplingFields
from nanovllm.apps.server.serving import Envelope
from nanovllm.engine.request import Sequence as Running
from nanovllm.errors import ConfigError
from nanovllm.features.progress_bar import Meter
from nanovllm.features.speculation import draft_model, drafter
from nanovllm.features.speculation.draft_model import DraftModel, Followed
from nanovllm.features.speculation.lengths import STALE, PassCosts, draft_length, shared_out
from nanovllm.features.speculation.ngrams import NgramIndex
from nanovllm.layers import causal_lm
from nanovllm.lora_request import LoRARequest
from nanovllm.memory import states

# the end of `write_byte_level`
BLOCK = 16
VOCAB = 300
EOS = 277
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
DRAFT: dict[str, Any] = {"method": "draft_model", "num_speculative_tokens": 4}
MODEL: dict[str, Any] = {**WIDE, "family": "llama", "vocab": VOCAB, "eos_token_id": EOS}
SHARED = random_prompt(2 * BLOCK + 3, 256, seed=1)
PROMPTS = [SHARED, [*SHARED, 7, 8], SHARED[:BLOCK] + random_prompt(30, 256, seed=2), random_prompt(17, 256, seed=3)]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 5, "top_p": 0.95},
    "penalties": {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "held back": {"temperature": 0.8, "seed": 9, "min_tokens": 8, "stop_token_ids": list(range(60))},
    "stop strings": {"temperature": 1.0, "seed": 2, "stop": ["a", "e", "()"], "include_stop_str_in_output": True},
    "bad words": {"temperature": 0.0, "bad_words": ["ab", "c"], "logit_bias": {65: 3.0}},
    "grammar": {"temperature": 0.8, "seed": 1, "structured_outputs": {"regex": "([a-c]{2,3} [0-9]{2},){1,6}"}},
    "schema": {
        "temperature": 0.0,
        "structured_outputs": {"json": {"type": "array", "items": {"enum": ["aa", "ab"]}, "maxItems": 4}},
    },
}
COMMON = {"max_tokens": 3 * BLOCK - 3, "logprobs": 2}
RESIDENT = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 90}
FEW = {"kvcache_block_size": BLOCK, "max_num_batched_tokens": 40, "num_gpu_blocks": 14}
WAYS: dict[str, dict[str, Any]] = {
    "resident": RESIDENT,
    "offloaded": offloaded(BLOCK, 4, 90, max_num_batched_tokens=40),
    "offloaded, copies alone": offloaded(BLOCK, 6, 90, max_num_batched_tokens=29, cpu_attention=False),
    "recomputed": {**FEW, "preemption_mode": "recompute"},
    "swapped": {**FEW, "preemption_mode": "swap", "swap_space": 0.01},
    "int8": {**offloaded(BLOCK, 4, 90), "kv_cache_dtype": "int8"},
}

FAST = ("recomputed",)


class Scripted(CheckedDrafter):
    """Drafts the expected tokens, others or a mixture: a token after token 0 of `wrong` is right, as long as it is 0.

    expected: the output of each prompt. wrong: what is added to each drafted token, in turn.
    """

    def __init__(self, expected: Mapping[tuple[int, ...], Sequence[int]], wrong: Sequence[int]) -> None:
        self.expected = expected
        self.wrong = wrong
        self._calls = 0

    def draft(self, seq: Running, most: int, rows: int, tokens: int) -> list[int]:
        output = self.expected[tuple(seq.token_ids[: seq.prompt_len])]
        rest = [*output[seq.num_output_tokens :], 0, VOCAB - 1, 0, VOCAB - 1, 5][:most]
        self._calls += 1
        wrong = [self.wrong[(self._calls + place) % len(self.wrong)] for place in range(len(rest))]
        return [(token + add) % VOCAB for token, add in zip(rest, wrong, strict=True)]


@pytest.fixture(autouse=True)
def drafts_do_not_follow_measured_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (drafter, draft_model):
        monkeypatch.setattr(module, "draft_length", lambda acceptance, most, *costs: most)


checkpoint = checkpoint_fixture(seed=3, **MODEL, tokenizer={})


def requests() -> list[SamplingParams]:
    return [
        SamplingParams(**{**COMMON, "ignore_eos": "structured_outputs" not in each, **each}) for each in PARAMS.values()
    ]


def outputs(llm: LLM, params: Sequence[SamplingParams], lora: LoRARequest | None = None) -> list[Any]:
    """All that a request answers, of every prompt with all parameters at once."""
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in params]
    adapters = [lora if index % 2 else None for index in range(len(prompts))] if lora is not None else None
    named = {} if adapters is None else {"lora_request": adapters}
    found = llm.generate(prompts, [*params] * len(PROMPTS), use_tqdm=False, **named)
    assert llm.metrics().blocks.used == 0
    one = [output.outputs[0] for output in found]
    return [(c.token_ids, c.text, c.logprobs, c.cumulative_logprob, c.finish_reason, c.stop_reason) for c in one]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Any]:
    with LLM(checkpoint, **RESIDENT) as llm:
        found = outputs(llm, requests())
    assert {each[4] for each in found} == {"stop", "length"} and any(isinstance(each[5], str) for each in found)
    return found


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in FAST else pytest.mark.slow, id=way) for way in WAYS]
)
def test_outputs_are_those_without_speculation(checkpoint: Path, expected: list[Any], way: str) -> None:
    if way == "int8":
        with LLM(checkpoint, **WAYS[way]) as llm:
            expected = outputs(llm, requests())
    with LLM(checkpoint, **WAYS[way], speculative_config=NGRAM) as llm:
        assert outputs(llm, requests()) == expected
        assert outputs(llm, requests()) == expected, "from the prefix cache"
        metrics = llm.metrics()
        transfers = llm.kv_stats().transfers
    assert metrics.drafts.drafted_tokens >= metrics.drafts.accepted_tokens > 0 and metrics.prefix_cache.hit_tokens > 0
    assert metrics.preemptions.recomputed > 0 or way != "recomputed"
    assert metrics.preemptions.swapped > 0 or way != "swapped"
    assert transfers.h2d_bytes > 0 or not way.startswith("offloaded")


@pytest.mark.parametrize("case", fast_only(["window"], ["window", "scaled queries", "gguf", "lora"]))
def test_models_with_windows_stored_weights_and_adapters(checkpoint: Path, tmp_path: Path, case: str) -> None:
    engine: dict[str, Any] = offloaded(BLOCK, 4, 90, max_num_batched_tokens=40)
    stored = tmp_path / "model"
    lora = None
    if case == "lora":
        stored = checkpoint
        engine = engine | {"enable_lora": True, "max_lora_rank": 4}
        model = make_checkpoint(tmp_path / "same", seed=3, **MODEL)
        lora = make_adapter(tmp_path / "adapter", model)
    else:
        changes = {"window": {"family": "mistral", "sliding_window": 21}, "scaled queries": {"family": "ministral3"}}
        model = make_checkpoint(stored, seed=4, **{**MODEL, **changes.get(case, {})})
        write_byte_level(stored)
        if case == "gguf":
            model = make_checkpoint(tmp_path / "narrow", seed=4, **{**WIDE, "family": "llama"})
            stored = write_gguf(tmp_path / "model.gguf", model)
    params = requests()[:3]
    with LLM(stored, **engine) as llm:
        expected = outputs(llm, params, lora)
    with LLM(stored, **engine, speculative_config=NGRAM) as llm:
        assert outputs(llm, params, lora) == expected
        assert llm.metrics().drafts.drafted_tokens > 0


@pytest.mark.slow
def test_two_ranks(checkpoint: Path) -> None:
    params = requests()[:2]
    ranks = {**WAYS["offloaded"], "tensor_parallel_size": 2}
    with LLM(checkpoint, **ranks) as llm:
        expected = outputs(llm, params)
    with LLM(checkpoint, **ranks, speculative_config=NGRAM) as llm:
        assert outputs(llm, params) == expected
        assert llm.metrics().drafts.accepted_tokens > 0


@pytest.mark.parametrize("way", fast_only(["offloaded"], ["offloaded", "resident", "recomputed", "swapped"]))
@pytest.mark.parametrize("method", fast_only(["scripted"], ["scripted", "draft_model"]))
def test_states_of_recurrent_layers_replay_right_drafts(
    checkpoint: Path, tmp_path: Path, way: str, method: str
) -> None:
    make_checkpoint(tmp_path, seed=4, **{**MODEL, "family": "qwen3_5"})
    write_byte_level(tmp_path)
    params = [requests()[1]]
    config = NGRAM if method == "scripted" else {**DRAFT, "model": str(checkpoint)}
    with LLM(tmp_path, **WAYS[way]) as llm:
        expected = outputs(llm, params)
    known = {tuple(prompt): each[0] for prompt, each in zip(PROMPTS, expected, strict=True)}
    with pytest.MonkeyPatch.context() as patch:
        if way == "resident":
            patch.setattr(causal_lm, "CPU_CHUNK_ROWS", 3)  # rows of a sequence go on in the next part of a step
        if method == "scripted":
            scripted = Scripted(known, [0, 0, 1, 0, 0, 0, 0, 0, 0, 137])
            patch.setattr(build, "_drafter", lambda *arguments: scripted)
        with LLM(tmp_path, **WAYS[way], speculative_config=config) as llm:
            for _ in range(2):  # then from snapshots
                assert outputs(llm, params) == expected
            metrics = llm.metrics()
    assert metrics.drafts.drafted_tokens > metrics.drafts.accepted_tokens and metrics.prefix_cache.hit_tokens > 0
    assert metrics.drafts.accepted_tokens > 20 or method != "scripted"


def test_states_replay_beside_a_prefill_by_layers(tmp_path: Path) -> None:
    """Steps with layers of another prompt make no drafts; the first of them replays what the step before it left."""
    make_checkpoint(tmp_path, seed=4, **{**MODEL, "family": "qwen3_5", "max_positions": 512})
    write_byte_level(tmp_path)
    talker = PROMPTS[3]
    long = random_prompt(300, 256, seed=5)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(tmp_path, **RESIDENT) as llm:
        known = {tuple(each): token_ids(llm, [each], params)[0] for each in (talker, long)}
    scripted = Scripted(known, [0, 1, 0, 0, 137, 0, 0, 0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_drafter", lambda *arguments: scripted)
        few = offloaded(BLOCK, 4, 90, max_num_batched_tokens=24, cpu_attention=False)
        with LLM(tmp_path, **few, speculative_config=NGRAM) as llm:
            layerwise = watch_layerwise(llm)
            engine = llm.engine
            found = {}
            engine.add_request("talker", None, params, talker)
            while not engine.step()[0].outputs[0].token_ids:
                pass
            engine.add_request("long", None, params, long)
            while engine.has_unfinished_requests():
                found |= {each.request_id: each.outputs[0].token_ids for each in engine.step() if each.finished}
            metrics = llm.metrics()
    assert len(layerwise) > 2 and metrics.drafts.drafted_tokens > metrics.drafts.accepted_tokens > 0
    assert found == {"talker": known[tuple(talker)], "long": known[tuple(long)]}


@pytest.mark.parametrize("family", ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in ["qwen3_5"])])
def test_drafts_that_overflow_end_no_request(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention multiplies the values of later tokens by 0, which makes NaN of an infinite one."""
    make_checkpoint(tmp_path, seed=4, **{**MODEL, "family": family})
    write_byte_level(tmp_path)
    with LLM(tmp_path, **RESIDENT) as llm:
        expected = outputs(llm, requests()[:2])
    used = {token for each in expected for token in each[0]} | {token for prompt in PROMPTS for token in prompt}
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.embed_tokens.weight"][[token for token in range(VOCAB) if token not in used]] = float("inf")
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    for params, due in zip(requests()[:2], (expected[::2], expected[1::2]), strict=True):
        known = {tuple(prompt): each[0] for prompt, each in zip(PROMPTS, due, strict=True)}
        drafts = Scripted(known, [*[0] * 30, *range(1, 40)])
        monkeypatch.setattr(build, "_drafter", lambda *arguments, drafts=drafts: drafts)
        with LLM(tmp_path, **RESIDENT, speculative_config=NGRAM) as llm:
            assert outputs(llm, [params]) == due
        assert drafts.accepted > 0


def test_a_sequence_that_ends_after_right_drafts_leaves_its_state(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, seed=4, **{**MODEL, "family": "qwen3_5"})
    prompt = random_prompt(BLOCK + 1, 256, seed=3)
    cached = list[int]()
    known = dict[tuple[int, ...], Sequence[int]]()
    ends_at_a_block = SamplingParams(temperature=0.0, max_tokens=BLOCK, ignore_eos=True)
    for named in ({}, {"speculative_config": NGRAM}):
        with pytest.MonkeyPatch.context() as patch:
            drafts = Scripted(known, [0]) if named else None
            patch.setattr(build, "_drafter", lambda *arguments, drafts=drafts: drafts)
            with LLM(tmp_path, **RESIDENT, **named) as llm:
                (known[tuple(prompt)],) = token_ids(llm, [prompt], ends_at_a_block)
                longer = [*prompt, *known[tuple(prompt)], 5]
                (found,) = llm.generate([longer], SamplingParams(max_tokens=1), use_tqdm=False)
                cached.append(found.num_cached_tokens)
                assert drafts is None or drafts.accepted > 0
    assert cached == [2 * BLOCK, 2 * BLOCK]


@pytest.mark.parametrize(
    "few", [{"max_num_seqs": 1}, {"enable_prefix_caching": False}, {"max_num_seqs": 1, "enable_prefix_caching": False}]
)
def test_a_state_is_held_during_drafts_however_few_sequences_run(tmp_path: Path, few: dict[str, Any]) -> None:
    """Without a prefix cache no snapshot lies in the slots beside those of running sequences."""
    make_checkpoint(tmp_path, seed=4, **{**MODEL, "family": "qwen3_5"})
    write_byte_level(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with LLM(tmp_path, **RESIDENT, **few) as llm:
        expected = token_ids(llm, PROMPTS, params)
    known = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_drafter", lambda *arguments: Scripted(known, [0, 0, 1, 0, 137]))
        with LLM(tmp_path, **RESIDENT, **few, speculative_config=NGRAM) as llm:
            assert token_ids(llm, PROMPTS, params) == expected
            metrics = llm.metrics()
    assert metrics.drafts.drafted_tokens > metrics.drafts.accepted_tokens > 20


def test_a_draft_model_rests_while_there_is_no_state_slot(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, seed=4, **{**MODEL, "family": "qwen3_5"})
    write_byte_level(tmp_path)
    passes = passes_of_draft_models(monkeypatch)
    config = {**DRAFT, "model": str(checkpoint)}
    few = {"max_num_seqs": 1, "enable_prefix_caching": False}
    plan = states.plan_states

    def with_one_slot(*facts: Any) -> Any:
        slots = plan(*facts)
        return slots if slots is None else slots._replace(device=1)

    monkeypatch.setattr(states, "plan_states", with_one_slot)
    with LLM(tmp_path, **RESIDENT, **few, speculative_config=config) as llm:
        token_ids(llm, [SHARED], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
        assert llm.metrics().drafts.drafted_tokens == 0
    assert passes == []


def test_a_draft_model_drafts_what_a_step_can_verify(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many sequences as may run have as many drafts together as one alone."""
    passes = passes_of_draft_models(monkeypatch)
    config = {**DRAFT, "num_speculative_tokens": 6, "model": str(checkpoint)}
    with LLM(checkpoint, **RESIDENT, max_num_seqs=4, speculative_config=config) as llm:
        token_ids(llm, PROMPTS, SamplingParams(temperature=0.0, max_tokens=BLOCK, ignore_eos=True))
        drafted = llm.metrics().drafts.drafted_tokens
    assert sum(passes) == drafted > 0
    assert shared_out([6, 6, 1, 6], 6) == [2, 2, 1, 1] and shared_out([3, 2], 6) == [3, 2] and shared_out([], 6) == []


def test_a_draft_model_asks_seldom_for_room_that_others_hold(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its KV cache holds two sequences until they grow; then one of them has drafts again when the other has ended."""
    asked = Counter[int]()
    new_shadow = DraftModel._new_shadow

    def counted(self: DraftModel, each: Followed) -> Running:
        asked[each.seq.seq_id] += 1
        return new_shadow(self, each)

    monkeypatch.setattr(DraftModel, "_new_shadow", counted)
    config = {**DRAFT, "model": str(checkpoint), "max_model_len": 14 * BLOCK}
    prompts = [random_prompt(6 * BLOCK + 8, 256, seed=seed) for seed in (1, 2)]
    lengths = [SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True) for tokens in (80, 100)]
    with LLM(checkpoint, **RESIDENT, speculative_config=config) as llm:
        first, second = llm.generate(prompts, lengths, use_tqdm=False)
    assert sorted(asked.values())[0] == 1 and 2 < max(asked.values()) < 8
    assert first.metrics.accepted_tokens > 50 and second.metrics.accepted_tokens > 20


def passes_of_draft_models(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each pass of a draft model draws, from now on."""
    passes = list[int]()
    run = DraftModel._run

    def watched(self: DraftModel, parts: Any) -> None:
        passes.extend([sum(len(part.samples) for _, part in parts)] if parts else [])
        run(self, parts)

    monkeypatch.setattr(DraftModel, "_run", watched)
    return passes


@pytest.mark.parametrize(
    ("way", "seed"),
    fast_only(
        [("recomputed", 3)], [("recomputed", 3), ("resident", 3), ("offloaded", 4), ("swapped", 3), ("swapped", 4)]
    ),
)
def test_a_draft_model_gives_the_same_outputs(
    checkpoint: Path, expected: list[Any], tmp_path: Path, way: str, seed: int
) -> None:
    config = {**DRAFT, "model": str(tmp_path / "draft"), "max_model_len": 20 * BLOCK}
    make_checkpoint(tmp_path / "draft", seed=seed, **MODEL)  # the seed of the model itself, or of another
    write_byte_level(tmp_path / "draft")
    with LLM(checkpoint, **WAYS[way], speculative_config=config) as llm:
        assert outputs(llm, requests()) == expected
        before = llm.metrics()
        assert before.drafts.drafted_tokens > before.drafts.accepted_tokens or seed == 3
        alone = SamplingParams(temperature=0.8, seed=7, max_tokens=6, ignore_eos=True)
        llm.generate([{"prompt_token_ids": PROMPTS[2]}], alone, use_tqdm=False)
        after = llm.metrics()
    drafted = after.drafts.drafted_tokens - before.drafts.drafted_tokens
    accepted = after.drafts.accepted_tokens - before.drafts.accepted_tokens
    assert drafted > 0 and (accepted == drafted or seed != 3), "the same model draws the same with the same seed"


def test_a_draft_model_of_another_vocabulary_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "draft", seed=3, **{**MODEL, "vocab": VOCAB + 1})
    config = {**DRAFT, "model": str(tmp_path / "draft")}
    words = refusal(lambda: LLM(checkpoint, **RESIDENT, speculative_config=config), ConfigError)
    assert "has 301 tokens, and the model 300: take a draft model with the same vocabulary" in words
    ranks = refusal(lambda: LLM(checkpoint, tensor_parallel_size=2, speculative_config=config), ConfigError)
    assert "method='draft_model' is not supported with tensor_parallel_size=2" in ranks


def test_drafts_are_counted_for_users(checkpoint: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(checkpoint, **RESIDENT, speculative_config=NGRAM) as llm:
        (output,) = llm.generate([{"prompt_token_ids": SHARED}], params, use_tqdm=False)
    drafted = output.metrics.drafted_tokens
    accepted = output.metrics.accepted_tokens
    meter = Meter()
    envelope = Envelope("1", "text_completion", "model", SamplingFields(model="model"))
    meter.count(output)
    assert drafted > 0 and f"{accepted} of {drafted} drafts accepted" in meter.summary()
    envelope.count(0, output)
    usage = envelope.complete({})["usage"]["completion_tokens_details"]
    assert usage == {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}


def test_right_drafts_after_the_end_are_not_counted(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    with LLM(checkpoint, **RESIDENT) as llm:
        (whole,) = llm.generate([SHARED], SamplingParams(**params), use_tqdm=False)
    text = whole.outputs[0].text
    drafts = Scripted({tuple(SHARED): whole.outputs[0].token_ids}, [0])
    monkeypatch.setattr(build, "_drafter", lambda *arguments: drafts)
    with LLM(checkpoint, **RESIDENT, speculative_config=NGRAM) as llm:
        (output,) = llm.generate([SHARED], SamplingParams(**params, stop=[text[1]]), use_tqdm=False)
        metrics = llm.metrics()
    assert output.outputs[0].finish_reason == "stop" and drafts.accepted >= len(output.outputs[0].token_ids)
    assert output.metrics.accepted_tokens == metrics.drafts.accepted_tokens == len(output.outputs[0].token_ids) - 1


def test_an_index_finds_the_latest_of_the_longest_ngrams() -> None:
    index = NgramIndex(1, 3)
    tokens = [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]
    assert index.follow(tokens, 2) == [4, 9], "three tokens before two, though those came later"
    tokens += [6, 2, 3]
    assert index.follow(tokens, 9) == [6, 2, 3] and index.follow([*tokens, 77], 4) == []


def test_a_copy_goes_on_after_a_token_that_differs() -> None:
    index = NgramIndex(1, 2)
    tokens = [1, 2, 3, 4, 5, 6, 3, 8, 9, 1, 2]
    assert index.follow(tokens, 4) == [3, 4, 5, 6]
    index.verified(0)
    assert index.follow([*tokens, 8], 2) == [4, 5], "the text copied from, before one token elsewhere"
    index.verified(0)
    assert index.follow([*tokens, 8, 3], 2) == [8, 9], "it is left after a second wrong token in a row"
    index.verified(1)
    assert index.follow([*tokens, 8, 3, 8, 4], 2) == [1, 2], "another token where there was 9"
    assert index.follow([*tokens, 8, 3, 8, 4, 77], 2) == [], "what was not verified leads nowhere"


def test_the_number_of_drafts_follows_costs_and_acceptance() -> None:
    assert draft_length(0.9, 8, rows=1, tokens=1, share=0.0) == 8
    assert draft_length(0.3, 8, rows=1, tokens=1, share=0.5) == 0
    assert 0 < draft_length(0.8, 8, rows=1, tokens=1, share=0.1) < 8
    costs = PassCosts()
    for _ in range(20):
        for rows in (1, 4, 9):
            costs.add(rows, 2.0 + 0.5 * rows)
    assert costs.share == pytest.approx(0.25)


def test_one_slow_pass_does_not_end_drafts_for_good() -> None:
    costs = PassCosts()
    for _ in range(10):
        costs.add(1, 0.1)
    costs.add(16, 60.0)  # the machine did something else
    assert draft_length(0.5, 8, rows=1, tokens=1, share=costs.share) == 0
    for _ in range(STALE):
        costs.add(1, 0.1)
    assert draft_length(0.5, 8, rows=1, tokens=1, share=costs.share) > 0
    for _ in range(20):
        for rows in (1, 4, 9):
            costs.add(rows, 2.0 + 0.5 * rows)
    assert costs.share == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "draft_model", "num_speculative_tokens": 3}, "model='': must name the draft model"),
        ({**DRAFT, "model": "x", "max_model_len": 0}, "max_model_len=0: must be None or a whole number of at least 1"),
        ({**DRAFT, "model": "x", "prompt_lookup_max": 2}, "unknown field 'prompt_lookup_max'"),
        ({**DRAFT, "model": "/no/such/model"}, "'/no/such/model'"),
        ({"method": "mtp", "num_speculative_tokens": 1}, "of a LlamaForCausalLM no head for multi-token prediction"),
        ({"method": "mtp", "num_speculative_tokens": 1, "max_model_len": 0}, "max_model_len=0: must be"),
        ({"num_speculative_tokens": 3}, "method=None: must be one of ngram, draft_model, mtp"),
        ({"method": "ngram"}, "num_speculative_tokens=None: must be a whole number"),
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup": 2}, "unknown field 'prompt_lookup'"),
        ({**NGRAM, "prompt_lookup_min": 4}, "prompt_lookup_min=4: must be at most prompt_lookup_max=3"),
        ({**NGRAM, "prompt_lookup_max": True}, "prompt_lookup_max=True: must be a whole number"),
        ("ngram", "must be None or a dict"),
    ],
)
def test_other_configs_are_refused(checkpoint: Path, given: Any, words: str) -> None:
    assert words in refusal(lambda: LLM(checkpoint, speculative_config=given), ConfigError)
