"""Which experts the device keeps: places that are always right, and hits and copies over many routings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from fast import fast_only
from hypothesis import given
from hypothesis import strategies as st
from routings import (
    CHOSEN,
    EXPERTS,
    LAYERS,
    Routing,
    batched,
    cyclic_routing,
    even_routing,
    hits_of_best_choice,
    hits_of_following,
    hits_of_last_used,
    hits_of_taking,
    uses,
    zipf_routing,
)
from streamed_engines import PROMPTS, VOCAB
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.features.streamed_weights import uses as counted_uses
from nanovllm.features.streamed_weights.expert_cache import Expert, UsedMost
from nanovllm.layers.experts import Experts

ALL = LAYERS * EXPERTS
TOKENS = 1500
ROUTINGS = {
    "topics": lambda: zipf_routing(TOKENS, exponent=0.8, topic=300),
    "steep": lambda: zipf_routing(TOKENS, exponent=1.1, topic=300),
    "repeats": lambda: zipf_routing(TOKENS, exponent=0.6, topic=300, repeated=0.25),
    "even": lambda: even_routing(TOKENS),
    "rows": lambda: batched(zipf_routing(4 * TOKENS, exponent=0.8, topic=1000), 8),
}


@pytest.fixture(scope="module")
def routing() -> Any:
    made: dict[str, Routing] = {}
    return lambda name: made.setdefault(name, ROUTINGS[name]())


# ---- places


def test_the_expert_that_was_used_least_gives_way() -> None:
    cache = UsedMost(3)
    for chosen in ([1, 2], [1, 3], [1, 2], [1, 2]):
        places, _ = cache.take([(0, expert) for expert in chosen])
    last, missing = cache.take([(0, 4), (0, 1)])
    assert missing == [(0, 4)] and last[0, 1] == places[0, 1]
    assert cache.take([(0, 2), (0, 4)]) == ({(0, 2): places[0, 2], (0, 4): last[0, 4]}, []), "3 was used once"
    cache.clear()
    assert cache.take([(0, 1)])[1] == [(0, 1)]


def test_an_expert_that_was_brought_stays_for_one_pass() -> None:
    """The next token often chooses it again, though all others were used more."""
    cache = UsedMost(8)
    for chosen in (*([0, 1],) * 5, [0]):
        for layer in range(4):
            cache.take([(layer, expert) for expert in chosen])
    for layer in range(4):
        assert cache.take([(layer, 0), (layer, 2)])[1] == [(layer, 2)]
    missing = [cache.take([(layer, 0), (layer, 2)])[1] for layer in range(4)]
    assert missing == [[], [], [(2, 2)], []], "those of layers 0 and 1 stayed, and a quarter of the places is for such"
    assert cache.take([(3, 1)])[1] == [], "the newcomer of layer 3 took the place of that of layer 2"


def test_an_expert_on_its_way_is_used_when_it_has_arrived() -> None:
    cache = UsedMost(2)
    assert cache.follow([(0, 1), (0, 2), (0, 3)], most=1) == ({}, [((0, 1), 1)])
    assert cache.follow([(0, 1)], most=1) == ({}, []), "it is neither there nor missing"
    cache.arrived((0, 1))
    assert cache.follow([(0, 1), (0, 4)], most=0) == ({(0, 1): 1}, [])
    places, replacements = cache.follow([(0, 1), (0, 3), (0, 4)], most=5)
    assert places == {(0, 1): 1} and replacements == [((0, 4), 0)], "the one used more comes first"
    found = [cache.follow([(0, 5), (0, 6)], most=2)[1] for _ in range(100)]
    assert [pairs for pairs in found if pairs] == [[((0, 5), 1)]], "no place that waits for a copy is taken"
    cache.clear()
    assert cache.follow([(0, 9)], most=1)[1] == [((0, 9), 1)]


def test_only_what_is_used_clearly_more_takes_a_place() -> None:
    cache = UsedMost(1)
    cache.follow([(0, 1)], most=1)
    cache.arrived((0, 1))
    for _ in range(40):
        assert cache.follow([(0, 1)], most=1)[0] == {(0, 1): 0}
        assert cache.follow([(0, 2)], most=1)[1] == []
    replaced = [bool(cache.follow([(0, 2)], most=1)[1]) for _ in range(40)]
    assert sum(replaced) == 1 and 3 < replaced.index(True) < 20


CALLS = st.tuples(
    st.sampled_from(["take", "follow", "follow", "arrived", "clear"]),
    st.integers(0, 3),
    st.sets(st.integers(0, 9), min_size=1, max_size=4),
)


@given(st.lists(CALLS, max_size=60), st.integers(4, 12))
def test_each_place_has_one_expert_that_was_copied_there(calls: list[tuple[str, int, set[int]]], places: int) -> None:
    cache = UsedMost(places)
    content: dict[int, Expert] = {}  # what compute would find in a place
    coming: dict[int, Expert] = {}
    for call, layer, numbers in calls:
        experts = [(layer, number) for number in sorted(numbers)]
        if call == "take":
            taken, missing = cache.take(experts)
            content |= coming | {taken[expert]: expert for expert in missing}
            coming = {}
            assert set(taken) == set(experts) and {content[place] for place in taken.values()} == set(experts)
        elif call == "follow":
            there, replacements = cache.follow(experts, len(numbers) // 2)
            assert all(content[place] == expert and place not in coming for expert, place in there.items())
            missing = [expert for expert in experts if expert not in content.values() and expert not in coming.values()]
            assert {expert for expert, _ in replacements} <= set(missing)
            assert len(replacements) <= len(numbers) // 2
            for expert, place in replacements:
                assert place not in coming and content.pop(place, None) not in experts
                coming[place] = expert
            assert set(content.values()) & set(experts) == set(there)
        elif call == "arrived" and coming:
            place = min(coming)
            content[place] = coming.pop(place)
            cache.arrived(content[place])
        elif call == "clear":
            cache.clear()
            content = {}
            coming = {}


def test_scores_are_compared_alike_after_any_number_of_passes(routing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of_engine = hits_of_following(routing("topics"), ALL // 4)
    monkeypatch.setattr(counted_uses, "MOST_WEIGHT", 16.0)
    assert hits_of_following(routing("topics"), ALL // 4) == of_engine


# ---- hits and copies


BOUNDS: dict[tuple[str, int], tuple[float, float, float]] = {
    # places are 1 / n of all experts: hits of taking, hits of following, copies for each use
    ("topics", 32): (0.04, 0.11, 0.002),
    ("topics", 8): (0.29, 0.305, 0.006),
    ("topics", 4): (0.47, 0.465, 0.008),
    ("topics", 2): (0.69, 0.68, 0.010),
    ("steep", 8): (0.41, 0.41, 0.006),
    ("steep", 4): (0.60, 0.575, 0.010),
    ("repeats", 8): (0.32, 0.235, 0.006),
    ("repeats", 4): (0.49, 0.39, 0.010),
    ("even", 8): (0.105, 0.115, 0.007),
    ("even", 4): (0.23, 0.24, 0.010),
    ("rows", 8): (0.025, 0.235, 0.001),
    ("rows", 4): (0.28, 0.40, 0.001),
}


@pytest.mark.parametrize(("name", "n"), fast_only([("topics", 4), ("repeats", 4), ("even", 4), ("rows", 4)], BOUNDS))
def test_hits_and_copies_are_as_good_as_they_were(routing: Any, name: str, n: int) -> None:
    """And nearly those of the best choice that knows the whole routing, or better."""
    found = routing(name)
    of_taking = hits_of_taking(found, ALL // n)
    of_following, copies = hits_of_following(found, ALL // n)
    assert of_taking > BOUNDS[name, n][0] and of_taking > hits_of_last_used(found, ALL // n) - 0.015
    assert of_following > BOUNDS[name, n][1] and of_following > hits_of_best_choice(found, ALL // n) - 0.04
    assert copies < BOUNDS[name, n][2]


@pytest.mark.parametrize("places", [3, 8, 12, 15])
def test_a_cache_smaller_than_a_pass_has_what_fits(places: int) -> None:
    """The same experts in each pass: what was used longest ago would always be what is asked for next."""
    same = cyclic_routing(400)
    best = places / (LAYERS * CHOSEN)
    of_following, copies = hits_of_following(same, places)
    assert of_following == pytest.approx(best) and copies == 0
    if places >= CHOSEN:
        assert hits_of_taking(same, places) > 0.65 * best - 0.1
    assert hits_of_last_used(cyclic_routing(400), 12) == 0


def test_another_topic_is_followed() -> None:
    """Of two topics the second begins after 400 tokens, and its experts are there 100 tokens later."""
    first = zipf_routing(400, exponent=1.1, topic=10**9, shared=0.0, seed=1)
    second = zipf_routing(600, exponent=1.1, topic=10**9, shared=0.0, seed=2)
    cache = UsedMost(ALL // 4)
    hits = []
    for layers in [*first, *second]:
        there = 0
        for experts in uses(layers):
            found, replacements = cache.follow(experts, 2)
            there += len(found)
            for expert, _ in replacements:
                cache.arrived(expert)
        hits.append(there / (LAYERS * CHOSEN))
    before, begin, after = (sum(hits[at : at + 100]) / 100 for at in (300, 400, 550))
    assert begin < before - 0.1 and after > before - 0.05


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_of_a_recorded_routing_much_is_there(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = {"qwen3_moe": "num_experts", "gpt_oss": "num_local_experts"}[family]
    make_checkpoint(tmp_path, family, vocab=VOCAB, layers=LAYERS, **{name: 32})
    with LLM(tmp_path, dtype="float32", kvcache_block_size=16, num_gpu_blocks=120) as llm:
        recorded = recorded_routing(llm, monkeypatch)
    for n in (8, 4, 2):
        places = LAYERS * 32 // n
        best = hits_of_best_choice(recorded, places)
        of_following, copies = hits_of_following(recorded, places)
        assert hits_of_taking(recorded, places) > max(best, hits_of_last_used(recorded, places)) - 0.03
        assert of_following > best - 0.03 and copies < 0.02


def recorded_routing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Routing:
    """What the layers choose for tokens of three requests, one after the other."""
    chosen: list[list[int]] = []
    route = Experts.route

    def recorded(experts: Experts, x: Tensor) -> Any:
        routing = route(experts, x)
        if len(x) == 1:
            chosen.append(sorted(routing.chosen.flatten().tolist()))
        return routing

    monkeypatch.setattr(Experts, "route", recorded)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=200, ignore_eos=True)
    for prompt in PROMPTS:
        llm.generate([prompt], params, use_tqdm=False)
    return [chosen[begin : begin + LAYERS] for begin in range(0, len(chosen), LAYERS)]
