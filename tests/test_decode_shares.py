"""How decode bytes are divided: the formula, whole numbers of blocks, and rates that follow observations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.features.cpu_attention.shares import (
    Bandwidths,
    HostRead,
    LayerLoad,
    blocks_for_cpu_attention,
    layer_seconds,
)

MIB = 1 << 20
GPU = Bandwidths(link=50e9, host=200e9, device=3000e9)
CPU = Bandwidths(link=12e9, host=40e9, device=40e9, one_processor=True)

rates = st.builds(
    Bandwidths,
    link=st.floats(1e9, 1e11),
    host=st.floats(1e9, 5e11),
    device=st.floats(1e10, 5e12),
    one_processor=st.booleans(),
)


def test_a_faster_cpu_takes_more_and_one_processor_takes_all() -> None:
    load = LayerLoad([HostRead(MIB)] * 100)
    counts = [blocks_for_cpu_attention(load, replace(GPU, host=rate)) for rate in (1e8, 50e9, 200e9)]
    assert 0 == counts[0] < counts[1] < counts[2] < 100
    assert blocks_for_cpu_attention(load, CPU) == 100, "on one processor a copy gains nothing"


@given(
    reads=st.lists(st.builds(HostRead, st.integers(1, 16 * MIB), st.integers(1, 8)), max_size=12),
    link=st.integers(0, 64 * MIB),
    device=st.integers(0, 1 << 30),
    weights=st.integers(0, 1 << 30),
    given_rates=rates,
)
def test_no_number_of_blocks_is_better(
    reads: list[HostRead], link: int, device: int, weights: int, given_rates: Bandwidths
) -> None:
    def seconds(count: int) -> float:
        streamed = reads[count:]
        taken = reads[:count]
        return layer_seconds(
            link + sum(r.num_bytes for r in streamed),
            sum(r.num_bytes * r.readers for r in taken),
            device + sum(r.num_bytes * r.readers for r in streamed),
            weights,
            given_rates,
        )

    best = blocks_for_cpu_attention(LayerLoad(reads, link, device, weights), given_rates)
    assert seconds(best) == pytest.approx(min(map(seconds, range(len(reads) + 1))))
