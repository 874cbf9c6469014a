"""Which tests run: `slow` ones only when asked for, `cuda` ones only where torch sees a device."""

from __future__ import annotations

import os
import sys

import pytest


def pytest_configure() -> None:
    """Without a GPU, Triton kernels run in Triton's interpreter; it has to be told before anybody imports it."""
    if not _sees_cuda():
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="run the tests marked slow as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--run-slow") and "slow" not in config.getoption("markexpr"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    # Not by keyword: the names of the directories above are keywords too.
    cuda = [item for item in items if item.get_closest_marker("cuda")]
    if cuda and not _sees_cuda():
        for item in cuda:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


@pytest.fixture(autouse=True)
def ordering_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine that a test makes runs on a device that finds unordered accesses to KV memory."""
    runner = sys.modules.get("nanovllm.engine.model_runner")  # loaded, if the test makes engines
    if runner is not None:
        from nanovllm.device.ordering import OrderingCheck

        create_device = runner.create_device
        monkeypatch.setattr(runner, "create_device", lambda name: OrderingCheck(create_device(name)))


def _sees_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
