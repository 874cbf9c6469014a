"""Products of few rows in Triton: exact, and a row's bits are its own."""

from __future__ import annotations

import pytest
import torch
from triton_mode import DEVICE, NARROW, TRITON_MARKS

from benchmarks.kernel_variants import few_rows_variants
from nanovllm.ops.kernel_config import FEW_ROWS, FewRowsConfig
from nanovllm.ops.triton_few_rows import few_rows_linear

pytestmark = TRITON_MARKS


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(48, 128), (33, 88)])
def test_products_are_exact_and_rows_alone(out_features: int, in_features: int, bias: bool) -> None:
    """Sizes of whole tiles and others; rows that follow each other at a distance."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, NARROW)

    x = random(FEW_ROWS, in_features + 8)[:, :in_features]
    weight = random(out_features, in_features)
    added = random(out_features) if bias else None
    config = FewRowsConfig(16, 64, 1, 2)
    found = few_rows_linear(x, weight, added, config)
    expected = x.double() @ weight.double().t() + (0.0 if added is None else added.double())
    assert ((found.double() - expected).abs() <= 2e-2 * expected.abs() + 2e-2).all()
    for rows in (slice(0, 1), slice(5, 6), slice(3, 11)):
        assert torch.equal(few_rows_linear(x[rows], weight, added, config), found[rows])
    assert few_rows_linear(x[:0], weight, added, config).shape == (0, out_features)


@pytest.mark.parametrize("config", few_rows_variants()[::3], ids=str)
def test_products_with_the_configurations_of_a_sweep(config: FewRowsConfig) -> None:
    x = torch.randn(3, 264).to(DEVICE, NARROW)
    weight = torch.randn(70, 264).to(DEVICE, NARROW)
    expected = x.double() @ weight.double().t()
    found = few_rows_linear(x, weight, None, config).double()
    assert ((found - expected).abs() <= 2e-2 * expected.abs() + 4e-2).all()
