"""Requests of several sequences on the model of KV content. No torch."""

from __future__ import annotations

from content_model import expected_output
from engine_helpers import Bench

from nanovllm.sampling_params import derived_seed


def seeds(seed: int, count: int) -> list[int]:
    """The seeds of the sequences; the first has the request's own."""
    return [seed, *(derived_seed(seed, "sequence", index) for index in range(1, count))]


def expected_group(prompt: list[int], count: int, max_tokens: int, seed: int = 7) -> list[list[int]]:
    return [expected_output(prompt, max_tokens, seed=own) for own in seeds(seed, count)]


def sampled(bench: Bench, name: str, prompt: list[int], max_tokens: int, **params: object) -> None:
    bench.add(name, prompt, max_tokens, temperature=1.0, **{"seed": 7, **params})


def outputs(bench: Bench, name: str) -> list[list[int]]:
    return [output.token_ids for output in bench.finished[name].outputs]
