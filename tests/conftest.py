"""Which tests run: `slow` ones only when asked for, `cuda` ones only where torch sees a device."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pauses import VARIABLE, install_pauses
from waiting import be_patient


def pytest_configure(config: pytest.Config) -> None:
    """Without a GPU, Triton kernels run in Triton's interpreter; it has to be told before anybody imports it.

    Property tests may take as long as a busy machine needs. In CI, as the variable of that name says, they have the
    same examples in every run, so that a failure is due to the change at hand.

    The newest CPU kernels are used, whatever is faster here: no test measures, nor reads what another program measured.
    A list in NANOVLLM_CPU_KERNELS imitates a processor on which others are.

    Tests press Ctrl-C, which a job that a shell starts in the background is made to ignore.

    Where other processes run the tests, this one imports no torch.
    """
    if config.getoption("dist", "no") != "no":
        return
    gc.disable()  # until all is imported
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not _sees_cuda():
        os.environ["TRITON_INTERPRET"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the network
    os.environ.setdefault("NANOVLLM_CPU_KERNELS", "default")
    if find_spec("hypothesis") is not None:
        from hypothesis import HealthCheck, settings

        patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.register_profile("nanovllm", patient, derandomize="CI" in os.environ)
        settings.load_profile("nanovllm")
    install_pauses()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption("--slow-of", metavar="FILE", help="run the tests of this file that are marked slow as well")


def pytest_report_header() -> str | None:
    seed = os.environ.get(VARIABLE)
    return f"random pauses in threads: {VARIABLE}={seed}" if seed else None


def pytest_collection_finish() -> None:
    """What was imported stays, so the garbage collector need not look at its millions of objects again."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries say at the end what they find left over


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--run-slow") and "slow" not in config.getoption("markexpr"):
        whole = config.getoption("--slow-of")
        if whole is not None and not (Path(__file__).parent / whole).is_file():
            raise pytest.UsageError(f"--slow-of {whole}: must be the name of a file in {Path(__file__).parent}")
        slow = [item for item in items if item.get_closest_marker("slow") and item.path.name != whole]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow") or item.path.name == whole]
    # Rare cases run on the best instruction set, common ones on all.
    rare = {item for item in items if len(list(item.iter_markers("slow"))) > 1 and _names_instruction_set(item)}
    config.hook.pytest_deselected(items=list(rare))
    items[:] = [item for item in items if item not in rare]
    # Not by keyword: the names of the directories above are keywords too.
    cuda = [item for item in items if item.get_closest_marker("cuda")]
    if cuda and not _sees_cuda():
        for item in cuda:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


def _names_instruction_set(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and "instruction_set" in item.fixturenames


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that use the fixture `instruction_set` run once for each that this machine has; fast ones on the best."""
    if "instruction_set" in metafunc.fixturenames:
        from nanovllm.ops.cpu_kernels import instruction_sets

        best, *others = instruction_sets()
        slow = [pytest.param(isa, marks=pytest.mark.slow) for isa in others]
        metafunc.parametrize("instruction_set", [best, *slow], indirect=True)


@pytest.fixture
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Makes this machine, to the kernels that choose at run time, one whose best instruction set is this one."""
    from nanovllm.ops import cpu_kernels
    from nanovllm.ops.kernel_choice import kernel_choice

    monkeypatch.setenv("NANOVLLM_CPU_KERNELS", "default")
    kernel_choice.cache_clear()
    own = cpu_kernels.instruction_sets()
    monkeypatch.setattr(cpu_kernels, "instruction_sets", lambda: own[own.index(request.param) :])
    assert cpu_kernels.choose(None, "linear.bfloat16") == request.param  # or the tests would all run on the best one
    yield str(request.param)
    kernel_choice.cache_clear()


@pytest.fixture(autouse=True)
def torch_is_seeded() -> None:
    """A test that draws numbers without a generator of its own draws the same ones in every run."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def ordering_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine that a test makes runs on a device that finds unordered accesses to KV memory.

    On the CPU unless the test names the device: what the tests say of bits is said of the CPU.
    """
    runner = sys.modules.get("nanovllm.build")  # loaded, if the test makes engines
    if runner is not None:
        from ordering_check import OrderingCheck

        create_device = runner.create_device
        monkeypatch.setattr(runner, "create_device", lambda name: OrderingCheck(create_device(name or "cpu")))


@pytest.fixture(autouse=True)
def rates_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine goes by what it measures, so that nothing in a test depends on the machine's load.

    Bandwidths are given and stay as they are, and the costs of drafts are a guess.
    """
    if "nanovllm.build" not in sys.modules:  # loaded, if the test makes engines
        return
    from nanovllm.features.cpu_attention import balance, host_blocks
    from nanovllm.features.cpu_attention.shares import Bandwidths
    from nanovllm.features.speculation import draft_model, drafter, lengths
    from nanovllm.features.streamed_weights import host_share, stream

    class Given(host_share.HostShare):
        def observe(self, step: host_share.StepCost) -> None:
            pass

    class Unmoved(balance.BalancedShare):
        def observe(self, step: balance.StepTimes) -> None:
            pass

    class Guessed(lengths.PassCosts):
        def add(self, rows: int, seconds: float) -> None:
            pass

    given = Bandwidths(link=10e9, host=20e9, device=20e9)
    monkeypatch.setattr(host_blocks, "measure_bandwidths", lambda *_: given)
    monkeypatch.setattr(host_blocks, "BalancedShare", Unmoved)
    monkeypatch.setattr(stream, "HostShare", Given)
    for module in (drafter, draft_model):
        monkeypatch.setattr(module, "PassCosts", Guessed)


@pytest.fixture(autouse=True)
def nobody_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a disk, a rank or a client does late on a busy machine is not taken for never. Some tests are impatient."""
    be_patient(monkeypatch)


def _sees_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def plain_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that `quantized_checkpoints.quantize` brings into other forms; not to be changed."""
    from quantized_checkpoints import make_plain

    return make_plain(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct in Hugging Face format: Transformers has dequantized it in float32."""
    from nanovllm.apps.real_models import UnavailableError
    from nanovllm.apps.real_models.smollm2 import checkpoint

    try:
        return checkpoint()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random checkpoint for 1,024 positions, with a tokenizer and a chat template; not to be changed."""
    from cli_helpers import make_model

    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[Any]:
    """An engine for asyncio with the tiny checkpoint; not to be broken, and idle again after the module's tests."""
    from server_helpers import CACHE, nothing_left

    from nanovllm.apps.server.async_llm import AsyncLLM

    with AsyncLLM(model, **CACHE) as engine:
        yield engine
        assert nothing_left(engine)


@pytest.fixture
def quantized_copy(plain_checkpoint: Path, tmp_path: Path) -> Callable[[str], Path]:
    """The checkpoint in the form of a variant, for a test to change."""
    from quantized_checkpoints import quantize

    return lambda variant: quantize(plain_checkpoint, tmp_path / variant, variant)


@pytest.fixture
def fresh() -> Iterator[int]:
    """Tokens that occur in no other sequence of the test."""
    return count(1000)
