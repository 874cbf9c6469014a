"""A rank that dies, raises or hangs ends the engine with its error, not with a timeout, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path

import pytest
from checkpoints import checkpoint_fixture
from engines import greedy, random_prompt, token_ids
from fast import pairs
from rank_failures import VARIABLE, run_failing_rank
from rank_processes import is_running, rank_pids
from waiting import eventually

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, EngineError
from nanovllm.features.distributed import executor, launch

ARGUMENTS = {"tensor_parallel_size": 2, "kvcache_block_size": 16, "num_gpu_blocks": 40}
WORDS = {
    "kill": "rank {rank} was killed by signal 9",
    "raise": "rank {rank} has failed: injected (LookupError)",
}


model_dir = checkpoint_fixture()


def listening_sockets() -> set[str]:
    """Sockets of this process that listen on a TCP port."""
    tables = (Path("/proc/net") / name for name in ("tcp", "tcp6"))
    lines = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    listening = {fields[9] for fields in lines if fields[3] == "0A"}
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except OSError:
            continue
    return {inode for inode in listening if f"socket:[{inode}]" in own}


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    sockets = listening_sockets()
    ranks = rank_pids(os.getpid())
    yield
    assert rank_pids(os.getpid()) == ranks
    assert listening_sockets() == sockets


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(("way", "phase", "rank"), pairs(WORDS, ["load", "prefill", "decode"], [0, 1]))
def test_a_failing_rank_ends_the_engine(
    way: str, phase: str, rank: int, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{rank},{phase},{way}")
    monkeypatch.setattr(launch, "run_rank", run_failing_rank)
    with pytest.raises(EngineError) as caught:
        if phase == "load":
            LLM(model_dir, **ARGUMENTS)
        else:
            llm = LLM(model_dir, **ARGUMENTS)
            token_ids(llm, random_prompt(20, 199, 0), greedy(8))
    assert WORDS[way].format(rank=rank) in str(caught.value)
    if way == "raise":
        assert "LookupError: injected" in "".join(traceback.format_exception(caught.value))
    if phase != "load":
        with pytest.raises(EngineError, match="the engine has ended: make a new LLM"):
            token_ids(llm, random_prompt(20, 199, 0), greedy(8))
        llm.close()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_hanging_rank_ends_the_engine(rank: int, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "CAUSE_SECONDS", 1.0)  # the rank that hangs will not speak
    monkeypatch.setenv(VARIABLE, f"{rank},decode,hang")
    monkeypatch.setattr(launch, "run_rank", run_failing_rank)
    llm = LLM(model_dir, distributed_timeout_seconds=10, **ARGUMENTS)
    with pytest.raises(EngineError, match=rf"rank {rank} has not answered for 10 s"):
        token_ids(llm, random_prompt(20, 199, 0), greedy(8))


@pytest.mark.usefixtures("nothing_is_left")
def test_a_port_that_is_taken_is_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given by another launcher than torchrun; without one, the system chooses the port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        for name, value in {**given, "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, str(value))
        arguments = {"distributed_executor_backend": "external_launcher", **ARGUMENTS}
        with pytest.raises(ConfigError, match=rf"MASTER_PORT={port}: the ranks' store cannot be opened there: .*free"):
            LLM(model_dir, **arguments)
        with pytest.raises(ConfigError, match="tensor_parallel_size=3: torchrun has started 2 ranks"):
            LLM(model_dir, **{**arguments, "tensor_parallel_size": 3})


def test_others_that_reach_the_port_of_the_engine_are_no_ranks() -> None:
    with launch.Listener(("127.0.0.1", 0), authkey=b"right") as listener:

        def come() -> None:
            socket.create_connection(listener.address).close()
            with suppress(AuthenticationError):
                Client(listener.address, authkey=b"wrong")
            Client(listener.address, authkey=b"right").send(1)

        thread = threading.Thread(target=come)
        thread.start()
        found = launch._accepted(listener, 1)
        thread.join()
    assert list(found) == [1]
    with socket.socket(fileno=os.dup(found[1].fileno())) as same:
        assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "no message waits for an acknowledgement"


def test_a_rank_that_torchrun_starts_again_does_not_look_for_the_engine_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of torchrun's agent keeps what an earlier attempt has left in it."""
    store, port = launch.local_store()
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for name, value in {**given, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(launch, "_spawn", lambda setup: None)
    monkeypatch.setattr(launch, "_accepted", lambda listener, count: {1: None})

    def start(rank: int, attempt: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        launch._start_with_torchrun(EngineConfig(model="", tensor_parallel_size=2), None, None, None)  # type: ignore[arg-type]

    start(0, attempt=0)
    with pytest.raises(ConnectionRefusedError):
        start(1, attempt=0)  # it has ended
    monkeypatch.setattr(launch, "START_SECONDS", 0.5)
    with pytest.raises(EngineError, match=r"the first rank.s process has not come within 0\.5 s"):
        start(1, attempt=1)
    del store


ENGINE = """
import sys
from nanovllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], tensor_parallel_size=2, kvcache_block_size=16, num_gpu_blocks=40)
    print(*(rank.process.pid for rank in llm.engine.executor._ranks), flush=True)
    if sys.argv[2] == "idle":
        input()
    while True:
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True), use_tqdm=False)
        llm.reset_prefix_cache()
"""


@pytest.mark.slow
@pytest.mark.parametrize("state", ["idle", "busy"])
def test_ranks_end_with_the_process_of_the_engine(state: str, model_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    with subprocess.Popen(
        [sys.executable, str(script), str(model_dir), state], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        assert len(pids) == 2
        engine.send_signal(signal.SIGKILL)
        engine.wait()
    assert eventually(lambda: not any(map(is_running, pids)))


UNGUARDED = """
import sys
from nanovllm import LLM
LLM(sys.argv[1], tensor_parallel_size=2, kvcache_block_size=16, num_gpu_blocks=40)
"""


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(model_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    done = subprocess.run([sys.executable, str(script), str(model_dir)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "needs `if __name__ == '__main__':` around it" in done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
def test_two_engines_in_one_process(model_dir: Path) -> None:
    prompt = random_prompt(20, 199, 0)
    with LLM(model_dir, **ARGUMENTS) as one, LLM(model_dir, **ARGUMENTS) as other:
        assert token_ids(one, prompt, greedy(8)) == token_ids(other, prompt, greedy(8))
        one.close()
        assert token_ids(other, prompt, greedy(3))
