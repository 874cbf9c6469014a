"""The Triton products of LoRA adapters against plain torch, in the interpreter or on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from engines import greedy, random_prompt
from fast import fast_pairs
from lora_helpers import ALL, make_adapter
from torch import Tensor
from triton_mode import DEVICE, DTYPES, NARROW, TRITON_MARKS

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.data.batch import Adapter
from nanovllm.features.lora import manager as manager_module
from nanovllm.features.lora.adapter_files import AdapterRegistry
from nanovllm.features.lora.grouped_adapters import GroupedAdapters
from nanovllm.features.lora.manager import LoRAManager
from nanovllm.lora_request import LoRARequest
from nanovllm.models.hf_config import load_network_config
from nanovllm.models.loader import load_model
from nanovllm.ops import triton_lora
from nanovllm.ops.triton_lora import FIELDS, add_low_rank_

pytestmark = TRITON_MARKS
# Of the sum of the products' sizes: rounding of x A^T and of the result, and of fp32 sums.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
PARTS = ((0, 20), (20, 91))  # columns of y
RANKS = ((8, 0), (0, 0), (1, 20))  # of each slot and part
MAX_RANK = 24


@pytest.fixture(autouse=True)
def small_tiles_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the largest rank takes two."""
    monkeypatch.setattr(triton_lora, "MOST_RANKS", 16)


class Adapters:
    """Random A and B of every slot and part, and the table that says where they are."""

    def __init__(self, in_features: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(in_features)
        matrices: list[Tensor] = []
        self.parts: list[list[tuple[Tensor, Tensor]]] = []
        table = torch.zeros(len(RANKS), len(PARTS), FIELDS, dtype=torch.int64)
        for slot, ranks in enumerate(RANKS):
            self.parts.append([])
            for part, (rank, (begin, end)) in enumerate(zip(ranks, PARTS, strict=True)):
                a, b = (torch.randn(shape, generator=generator) for shape in ((rank, in_features), (end - begin, rank)))
                self.parts[slot].append((a.to(DEVICE, dtype), b.to(DEVICE, dtype)))
                offsets = []
                for matrix in self.parts[slot][-1]:
                    offsets.append(sum(each.numel() for each in matrices))
                    matrices += [matrix.flatten(), matrix.new_zeros(-matrix.numel() % 16)]
                table[slot, part] = torch.tensor([offsets[0], rank, offsets[1], begin, end])
        self.memory = torch.cat(matrices)
        self.table = table.to(DEVICE)

    def add_(self, y: Tensor, x: Tensor, slots: list[int | None]) -> None:
        """Add to y the product of each row's slot, None for none."""
        rows = sorted((row for row, slot in enumerate(slots) if slot is not None), key=lambda row: slots[row] or 0)
        counts = torch.tensor([slots.count(slot) for slot in range(len(RANKS))])
        on_device = torch.tensor(rows, dtype=torch.int64, device=DEVICE)
        add_low_rank_(y, x, self.memory, self.table, on_device, counts.cumsum(0).to(DEVICE), MAX_RANK)

    def expected(self, y: Tensor, x: Tensor, slots: list[int | None]) -> tuple[Tensor, Tensor]:
        """The sums in fp64, and the sums of the sizes of what they add."""
        total = y.double()
        size = y.double().abs()
        for row, slot in enumerate(slots):
            for (begin, end), (a, b) in zip(PARTS, self.parts[slot] if slot is not None else (), strict=False):
                low = x[row].double() @ a.double().T
                total[row, begin:end] += low @ b.double().T
                size[row, begin:end] += x[row].double().abs() @ a.double().abs().T @ b.double().abs().T
        return total, size


@pytest.mark.parametrize(
    ("rows", "in_features", "dtype"),
    fast_pairs([(1, 640, NARROW)], [1, 40], [100, 640], DTYPES),
    ids=str,
)
def test_each_row_gets_its_own_adapter(rows: int, in_features: int, dtype: torch.dtype) -> None:
    """Up to two tiles of rows of one adapter, and two splits of the inputs; an adapter that changes nothing."""
    adapters = Adapters(in_features, dtype)
    slots: list[int | None] = [2, None, 0, *[2] * (rows - 1), 1, None]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(slots), in_features + 8, generator=generator).to(DEVICE, dtype)[:, :in_features]
    y = torch.randn(len(slots), PARTS[-1][1], generator=generator).to(DEVICE, dtype)
    (expected, size) = adapters.expected(y, x, slots)
    before = y.clone()
    adapters.add_(y, x, slots)
    assert ((y.double() - expected).abs() <= BOUNDS[dtype] * size).all()
    unchanged = [row for row, slot in enumerate(slots) if slot in (None, 1)]
    assert torch.equal(y[unchanged], before[unchanged]) and torch.equal(y[2, 20:], before[2, 20:])
    alone = before[:1].clone()
    adapters.add_(alone, x[:1], [2])
    assert torch.equal(alone, y[:1]), "a row depends on itself alone"
    adapters.add_(alone, x[:1], [None])
    assert torch.equal(alone, y[:1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and three adapters of different modules and ranks, a0 to a2."""
    path = tmp_path_factory.mktemp("lora")
    model = make_checkpoint(path / "model", layers=1)
    for index, targets in enumerate([ALL, ("k_proj", "o_proj"), ("gate_proj", "down_proj")]):
        make_adapter(path / f"a{index}", model, index + 1, targets, rank=(8, 3, 5)[index])
    return path


def managers(folder: Path, monkeypatch: pytest.MonkeyPatch, max_loras: int) -> tuple[list[LoRAManager], list[Adapter]]:
    """A manager in plain torch and one with Triton, of one model, and its adapters."""
    config = EngineConfig(model=str(folder / "model"), enable_lora=True, max_loras=max_loras, max_lora_rank=8)
    model = load_model(config.model, load_network_config(config.model), torch.float32, torch.device(DEVICE))
    found = []
    for triton in (False, True):
        monkeypatch.setattr(manager_module, "use_triton", lambda tensor, triton=triton: triton)
        found.append(LoRAManager(model, config))
    registry = AdapterRegistry(model.network, 8)
    requests = [LoRARequest(f"a{i}", i + 1, str(folder / f"a{i}")) for i in range(3)]
    return found, [registry.find(request) for request in requests]


SEQUENCES = [(None, 1), (3, 2), (2, 1), (3, 2), (None, 6), (2, 1)]  # in parts of 6 rows, of which the second has none


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[LoRAManager], list[GroupedAdapters | None]]:
    """Both managers, in which adapter 3 took the slot of adapter 1, and what that with Triton gives to SEQUENCES."""
    found, adapters = managers(folder, monkeypatch, max_loras=2)
    monkeypatch.setattr(found[0]._model, "chunk_rows", 6)
    for manager in found:
        for step in ([adapters[0], adapters[1]], [adapters[1], adapters[2]]):
            assert manager.begin_step(step) == {}
    return found, found[1].of_rows(SEQUENCES)  # type: ignore[return-value]


def test_tables_say_where_the_matrices_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (plain, _), (first, none, last) = loaded(folder, monkeypatch)
    assert first is not None and none is None and last is not None
    assert first.ends.tolist() == [4, 5] and first.rows.tolist() == [1, 2, 4, 5, 3]
    assert last.ends.tolist() == [0, 1] and last.rows.tolist() == [0]
    memory = first.memory.flatten()
    seen = 0
    for linear in plain._model.layers[0].linears:
        expected = [weights.get(linear) for _, weights in sorted(plain.on_device.values(), key=lambda each: each[0])]
        assert (linear in first.tables) == any(expected) and (linear in last.tables) == (expected[1] is not None)
        for slot, weights in enumerate(expected if linear in first.tables else ()):
            parts = [] if weights is None else list(weights.parts)
            table = first.tables[linear][slot].tolist()
            assert len(table) == len(linear.parts) and not any(any(fields) for fields in table[len(parts) :])
            for (a, rank, b, begin, end), (columns, ranks, matrix) in zip(table, parts, strict=False):
                assert weights is not None and (begin, end) == (columns.start, columns.stop) and rank == len(matrix.T)
                assert torch.equal(memory[a : a + rank * linear.in_features], weights.a[ranks].flatten())
                assert torch.equal(memory[b : b + rank * (end - begin)], matrix.flatten())
                seen += 1
    assert seen == 2 + 2  # k and o of adapter 2, gate and down of adapter 3


@pytest.mark.slow
def test_an_engine_has_the_tokens_of_plain_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_prompt(length, 199, seed=length) for length in (9, 20, 3)]
    requests = [None, *(LoRARequest(f"a{i}", i + 1, str(folder / f"a{i}")) for i in (0, 2))]
    found = []
    for triton in (False, True):
        monkeypatch.setattr(manager_module, "use_triton", lambda tensor, triton=triton: triton)
        arguments = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "dtype": "float32"}
        with LLM(folder / "model", device=DEVICE, num_gpu_blocks=20, kvcache_block_size=16, **arguments) as llm:
            outputs = llm.generate(prompts, greedy(6), use_tqdm=False, lora_request=requests)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
