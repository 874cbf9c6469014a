"""Which instruction set the CPU kernels use: by measured times, by the file for a machine, by the environment."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from nanovllm import LLM
from nanovllm.features.distributed import rank
from nanovllm.ops import kernel_choice
from nanovllm.ops.cpu_kernels import cpu_kernel_choice, instruction_sets
from nanovllm.ops.kernel_choice import WORKS, candidates, choice_file, faster, find_choice

ALL = ("avx512bf16", "avx512", "avx2", "portable")
SLOW_BF16 = dict.fromkeys(WORKS, "avx512bf16") | {"linear.bfloat16": "avx512"}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Measurement is on, finds bf16 products slow and takes no time. The works that were measured."""
    works: list[str] = []

    def measure(work: str, newest: str, other: str) -> str:
        works.append(work)
        return other if work == "linear.bfloat16" else newest

    monkeypatch.setattr(kernel_choice, "measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NANOVLLM_CPU_KERNELS")
    monkeypatch.delenv("NANOVLLM_CPU_ISA", raising=False)
    return works


@pytest.mark.parametrize(
    ("many", "few", "expected"),
    [
        ([2.0, 2.1, 1.9], [1.3, 1.3, 1.2], "avx512"),  # bf16 instructions at half the rate
        ([1.07, 1.07, 1.07], [1.07, 1.07, 1.07], "avx512bf16"),  # within the margin
        ([1.0, 9.0, 1.0], [1.0, 1.0, 9.0], "avx512bf16"),  # a disturbed round
        ([2.0, 2.0, 2.0], [0.5, 0.5, 0.5], "avx512bf16"),  # many rows gain what few rows lose
    ],
)
def test_another_instruction_set_is_used_where_it_is_clearly_faster(
    many: list[float], few: list[float], expected: str
) -> None:
    assert faster("avx512bf16", "avx512", [many, few]) == expected


def test_a_choice_is_measured_once_and_kept(measured: list[str], caplog: pytest.LogCaptureFixture) -> None:
    first = find_choice(ALL)
    assert first.isa_of == SLOW_BF16 and sorted(measured) == sorted(WORKS)
    assert str(first) == "avx512bf16, avx512 for linear.bfloat16 (measured)"
    assert find_choice(ALL) == first and len(measured) == len(WORKS) and not caplog.records
    assert find_choice(ALL[1:]).newest == "avx512" and len(measured) == 2 * len(WORKS)  # another machine


@pytest.mark.parametrize("text", ["{", '{"machine": 1}', "other machine", "unknown"])
def test_a_file_that_cannot_be_used_is_written_again(
    measured: list[str], caplog: pytest.LogCaptureFixture, text: str
) -> None:
    file = choice_file(ALL)
    assert file is not None
    find_choice(ALL)
    whole = file.read_text()
    changed = {"other machine": whole.replace('"machine": "', '"machine": "x'), "unknown": whole.replace("512", "9")}
    file.write_text(changed.get(text, text))
    assert find_choice(ALL).isa_of == SLOW_BF16 and len(measured) == 2 * len(WORKS)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert file.read_text() == whole and list(file.parent.iterdir()) == [file]


def test_the_environment_overrides_measurement(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    setting = find_choice(ALL).setting
    measured.clear()
    monkeypatch.setenv("NANOVLLM_CPU_KERNELS", "default")
    assert set(find_choice(ALL).isa_of.values()) == {"avx512bf16"}
    monkeypatch.setenv("NANOVLLM_CPU_KERNELS", "packed=avx2")
    assert find_choice(ALL).isa_of == dict.fromkeys(WORKS, "avx512bf16") | {"packed": "avx2"}
    monkeypatch.setenv("NANOVLLM_CPU_KERNELS", setting)
    assert find_choice(ALL).isa_of == SLOW_BF16
    monkeypatch.delenv("NANOVLLM_CPU_KERNELS")
    monkeypatch.setenv("NANOVLLM_CPU_ISA", "avx512")
    assert set(find_choice(ALL[1:]).isa_of.values()) == {"avx512"} and not measured
    monkeypatch.delenv("NANOVLLM_CPU_ISA")
    monkeypatch.setenv("NANOVLLM_CPU_KERNELS", "measure")
    assert find_choice(ALL).isa_of == SLOW_BF16 and len(measured) == len(WORKS)


def test_a_pinned_choice_replaces_the_one_that_the_process_has_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of torchrun has made its own before it knows those of the others."""
    monkeypatch.setenv("NANOVLLM_CPU_KERNELS", "default")
    kernel_choice.kernel_choice.cache_clear()
    own = cpu_kernel_choice().setting
    other = own.replace(f"packed={instruction_sets()[0]}", "packed=portable")
    kernel_choice.pin(kernel_choice.agreed([own, other]))
    assert cpu_kernel_choice().setting == other
    kernel_choice.kernel_choice.cache_clear()


@pytest.mark.slow
def test_ranks_use_the_choice_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The ranks' processes have a setting of their own, which differs from the engine's."""
    if "avx2" not in instruction_sets():
        pytest.skip("this machine has one instruction set only")
    make_checkpoint(tmp_path)
    setting = cpu_kernel_choice().setting.replace(f"packed={instruction_sets()[0]}", "packed=portable")
    monkeypatch.setattr(rank, "cpu_kernel_choice", lambda: type("Choice", (), {"setting": setting}))
    with caplog.at_level(logging.INFO, "nanovllm"), LLM(tmp_path, tensor_parallel_size=2, device="cpu"):
        pass
    assert "portable for packed (as NANOVLLM_CPU_KERNELS says)" in caplog.text


def test_every_measurement_runs_and_gives_one_of_the_two() -> None:
    """On whatever this machine has; what it finds is not looked at."""
    available = instruction_sets()
    for work in WORKS:
        newest, *others = candidates(work, available)
        other = others[0] if others else newest
        assert kernel_choice.measure(work, newest, other) in (newest, other)
