"""The recall checkpoint answers right in Transformers, each answer hangs on one row, and words round-trip."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
)

from nanovllm.apps.recall import (
    make_document,
    notable_positions,
    write_recall_checkpoint,
)

LENGTH = 2048
BLOCK = 64
ANSWER_TOKENS = 8
MIN_MARGIN = 50.0


@dataclass
class Recall:
    """A recall network in Transformers, a document, and the KV cache of that document."""

    model: Any
    document: list[int]
    cache: Any

    def logits(self, positions: list[int], corrupt: Callable[[DynamicCache], None] | None = None) -> Tensor:
        """Float32 logits [len(positions), vocab] of each question asked alone after the document."""
        cache = DynamicCache()
        for index, layer in enumerate(self.cache.layers):
            rows = [x.repeat(len(positions), 1, 1, 1) for x in (layer.keys, layer.values)]
            cache.update(rows[0], rows[1], index)
        if corrupt is not None:
            corrupt(cache)
        questions = torch.tensor([[self.document[p - 1]] for p in positions])
        with torch.no_grad():
            logits: Tensor = self.model(questions, past_key_values=cache).logits[:, -1].float()
        return logits

    def answers(self, positions: list[int], corrupt: Callable[[DynamicCache], None] | None = None) -> list[int]:
        return [int(token) for token in self.logits(positions, corrupt).argmax(-1)]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def recall(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recall:
    path = tmp_path_factory.mktemp(request.param)
    vocab_size = LENGTH + 100
    write_recall_checkpoint(path, vocab_size, LENGTH + 1 + ANSWER_TOKENS, seed=3, dtype=request.param)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert model.dtype == getattr(torch, request.param)
    document = make_document(vocab_size, LENGTH, seed=5)
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([document]), past_key_values=cache, logits_to_keep=1)
    return Recall(model, document, cache)


def test_every_block_edge_and_random_position_is_answered_with_a_wide_margin(recall: Recall) -> None:
    edges = notable_positions(LENGTH, 1, {"block": BLOCK})
    positions = [*edges, *random.Random(0).sample(range(1, LENGTH), 200)]
    for start in range(0, len(positions), 16):
        asked = positions[start : start + 16]
        top = recall.logits(asked).topk(2)
        assert top.indices[:, 0].tolist() == [recall.document[p] for p in asked]
        assert (top.values[:, 0] - top.values[:, 1]).min() > MIN_MARGIN, asked


@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("damage", ["zeroed", "row of the block before", "row of the next position"])
def test_one_damaged_row_changes_the_answer(recall: Recall, part: str, damage: str) -> None:
    positions = [2, BLOCK - 1, BLOCK, LENGTH // 2, LENGTH - 2]

    def corrupt(cache: DynamicCache) -> None:
        rows = getattr(cache.layers[1], part)
        for batch, position in enumerate(positions):
            source = {"row of the block before": position - BLOCK, "row of the next position": position + 1}
            index = source.get(damage)
            rows[batch, 0, position] = 0 if index is None else rows[batch, 0, index]

    right = [recall.document[p] for p in positions]
    assert recall.answers(positions) == right
    assert all(got != want for got, want in zip(recall.answers(positions, corrupt), right, strict=True))
