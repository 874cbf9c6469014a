"""Routings of mixtures, one entry a pass: for each layer the experts that it uses."""

from __future__ import annotations

from bisect import bisect
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from random import Random

from nanovllm.features.streamed_weights.expert_cache import Expert, UsedMost

Routing = Sequence[Sequence[Sequence[int]]]  # pass, layer, experts

LAYERS = 4
EXPERTS = 64
CHOSEN = 4  # of them for a token


def zipf_routing(
    tokens: int, *, exponent: float, topic: int, repeated: float = 0.0, shared: float = 0.4, seed: int = 0
) -> Routing:
    """Experts of a layer are used by a Zipf law, whose order is partly that of the layer and partly of the topic.

    topic: tokens that one lasts on average; there are six. shared: of the probability, what follows the layer's order.
    repeated: the probability that an expert of the token before is used again whatever the law says.
    """
    random = Random(seed)
    laws = [_laws(random, exponent, shared) for _ in range(LAYERS)]
    passes: list[list[list[int]]] = []
    current = 0
    for _ in range(tokens):
        if random.random() < 1 / topic:
            current = int(random.random() * 6)
        layers = []
        for layer, of_topics in enumerate(laws):
            before = passes[-1][layer] if passes and repeated else []
            chosen = {expert for expert in before if random.random() < repeated}
            law = of_topics[current]
            while len(chosen) < CHOSEN:
                chosen.add(bisect(law, random.random() * law[-1]))
            layers.append(sorted(chosen))
        passes.append(layers)
    return passes


def _laws(random: Random, exponent: float, shared: float) -> list[list[float]]:
    """Of a layer, for each topic, the running sums of the experts' probabilities."""
    own = _order(random)
    laws = []
    for _ in range(6):
        of_topic = _order(random)
        ranks = zip(own, of_topic, strict=True)
        laws.append(
            list(accumulate(shared * (a + 1) ** -exponent + (1 - shared) * (b + 1) ** -exponent for a, b in ranks))
        )
    return laws


def _order(random: Random) -> list[int]:
    return sorted(range(EXPERTS), key=lambda _: random.random())


def even_routing(tokens: int) -> Routing:
    return zipf_routing(tokens, exponent=0.0, topic=tokens)


def cyclic_routing(tokens: int) -> Routing:
    """Every token uses the same experts."""
    return [[list(range(CHOSEN))] * LAYERS] * tokens


def batched(routing: Routing, rows: int) -> Routing:
    """Passes of several tokens, each row with a sequence of its own."""
    length = len(routing) // rows
    return [
        [
            sorted({expert for row in range(rows) for expert in routing[row * length + step][layer]})
            for layer in range(LAYERS)
        ]
        for step in range(length)
    ]


def uses(layers: Sequence[Sequence[int]]) -> list[list[Expert]]:
    """Of a pass, layer after layer."""
    return [[(layer, expert) for expert in experts] for layer, experts in enumerate(layers)]


def hits_of_taking(routing: Routing, places: int) -> float:
    """The share of used experts that are there, where all others are brought at once."""
    cache = UsedMost(places)
    used = missed = 0
    for layers in routing:
        for experts in uses(layers):
            missed += len(cache.take(experts)[1])
            used += len(experts)
    return 1 - missed / used


def hits_of_following(routing: Routing, places: int, most: int = 2) -> tuple[float, float]:
    """The share of used experts that are there, and the experts copied for each used one, of passes after the first
    200. A copy takes one pass."""
    cache = UsedMost(places)
    copied_before: list[list[Expert]] = [[]] * len(routing[0])
    there = used = copied = 0
    for step, layers in enumerate(routing):
        for layer, experts in enumerate(uses(layers)):
            for expert in copied_before[layer]:
                cache.arrived(expert)
            found, replacements = cache.follow(experts, most)
            copied_before[layer] = [expert for expert, _ in replacements]
            if step >= 200:
                there += len(found)
                used += len(experts)
                copied += len(replacements)
    return there / used, copied / used


def hits_of_last_used(routing: Routing, places: int) -> float:
    """The same as of taking, where the expert that was used longest ago gives way."""
    kept: OrderedDict[Expert, None] = OrderedDict()
    used = found = 0
    for layers in routing:
        for experts in uses(layers):
            used += len(experts)
            found += sum(expert in kept for expert in experts)
            for expert in experts:
                kept[expert] = None
                kept.move_to_end(expert)
            while len(kept) > places:
                kept.popitem(last=False)
    return found / used


def hits_of_best_choice(routing: Routing, places: int) -> float:
    """Where the device has the experts from the beginning that the whole routing uses most."""
    counts = Counter(expert for layers in routing for experts in uses(layers) for expert in experts)
    return sum(count for _, count in counts.most_common(places)) / counts.total()
