"""Starting ranks: as processes of this machine, or those that torchrun has started on one machine or several."""

from __future__ import annotations

import json
import logging
import multiprocessing.process
import os
import pickle
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import current_process
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, EngineError, told
from nanovllm.features.distributed.messages import Hello
from nanovllm.features.distributed.rank import LOOPBACK, MakeRunner, RankSetup, run_rank
from nanovllm.models.spec import DecoderSpec
from nanovllm.ops.cpu_kernels import cpu_kernel_choice

START_SECONDS = 300.0  # until ranks on other machines have come
ENGINE_KEY = "nanovllm-engine"  # in torchrun's store: where the engine listens
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class StartedRanks:
    """The connection to each rank and its process, which is None if torchrun has started it.

    store: holds the store of the ranks' process group, which they need while they run. Emptying the list closes its
    port even if an error's traceback still refers to these ranks.
    """

    ranks: Sequence[tuple[Connection, BaseProcess | None]]
    store: list[Any]


def start_ranks(config: EngineConfig, spec: DecoderSpec, make_runner: MakeRunner) -> StartedRanks:
    """All ranks, in order. Does not return in a process that torchrun has started as a rank other than the first.

    spec: of the whole model.
    """
    if config.distributed_executor_backend == "external_launcher":
        return _start_with_torchrun(config, spec, make_runner, _torchrun(config))
    if getattr(current_process(), "_inheriting", False):  # a rank imports the script
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size}: a script that makes an LLM with several ranks needs "
            "`if __name__ == '__main__':` around it, since every rank imports the script"
        )
    store, port = local_store()
    size = config.tensor_parallel_size
    ranks = [_spawn(rank_setup(config, spec, make_runner, rank, rank, size, LOOPBACK, port)) for rank in range(size)]
    return StartedRanks(ranks, [store])


def local_store() -> tuple[dist.TCPStore, int]:
    """A store for ranks of this machine, and its port. The system chooses it; other machines do not reach it."""
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    return _store(LOOPBACK, port, is_master=True, listening=listening), port


def _spawn(setup: RankSetup) -> tuple[Connection, BaseProcess]:
    context = get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=run_rank, args=(other, setup), name=f"nanovllm-rank-{setup.rank}", daemon=True)
    process.start()
    # At exit multiprocessing ends all daemons of its list, also in a fork, whose ranks these are not. The executor ends
    # its ranks by itself.
    vars(multiprocessing.process)["_children"].discard(process)
    other.close()
    return own, process


def rank_setup(
    config: EngineConfig,
    spec: DecoderSpec,
    make_runner: MakeRunner,
    rank: int,
    local_rank: int,
    local_size: int,
    host: str,
    port: int,
) -> RankSetup:
    """store_host and store_port: `host` and `port`. The ranks of a machine divide the cores of this process."""
    return RankSetup(
        config=config,
        spec=spec,
        rank=rank,
        size=config.tensor_parallel_size,
        local_rank=local_rank,
        local_size=local_size,
        store_host=host,
        store_port=port,
        threads=max(1, torch.get_num_threads() // local_size),
        cpu_kernels=cpu_kernel_choice().setting,
        log_level=logging.getLogger("nanovllm").getEffectiveLevel(),
        make_runner=make_runner,
    )


def _store(host: str, port: int, *, is_master: bool, listening: socket.socket | None = None) -> dist.TCPStore:
    descriptor = None if listening is None else listening.detach()
    timeout = timedelta(seconds=START_SECONDS)
    return dist.TCPStore(
        host, port, is_master=is_master, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor
    )


# ---- torchrun


def _torchrun(config: EngineConfig) -> Mapping[str, str]:
    """torchrun's variables. Raises ConfigError if they are missing or do not fit."""
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(
            f"distributed_executor_backend='external_launcher': {', '.join(missing)} is not set, as torchrun sets it; "
            "start the program with torchrun, or leave the argument out"
        )
    size, found = config.tensor_parallel_size, os.environ["WORLD_SIZE"]
    if found != str(size):
        raise ConfigError(f"tensor_parallel_size={size}: torchrun has started {found} ranks; make both numbers equal")
    return {name: os.environ[name] for name in TORCHRUN_VARIABLES}


def _start_with_torchrun(
    config: EngineConfig, spec: DecoderSpec, make_runner: MakeRunner, given: Mapping[str, str]
) -> StartedRanks:
    rank, host, port = int(given["RANK"]), given["MASTER_ADDR"], int(given["MASTER_PORT"])
    local_rank, local_size = int(given["LOCAL_RANK"]), int(given["LOCAL_WORLD_SIZE"])
    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = rank == 0 and not agent_has_store
    try:
        store = _store(host, port, is_master=is_master)
    except RuntimeError as error:  # of torch.distributed
        what = "opened" if is_master else "reached"
        advice = "take a port that is free" if is_master else "look whether the first rank runs there"
        raise ConfigError(
            f"MASTER_ADDR={host}, MASTER_PORT={port}: the ranks' store cannot be {what} there: {told(error)}; {advice}"
        ) from error
    setup = rank_setup(config, spec, make_runner, rank, local_rank, local_size, host, port)
    if rank != 0:
        _become_rank(store, setup)
    key = secrets.token_bytes(32)
    with Listener((host, 0), backlog=setup.size, authkey=key) as listener:
        store.set(ENGINE_KEY, json.dumps([*listener.address, key.hex()]))
        first = _spawn(setup)
        others = _accepted(listener, setup.size - 1)
    return StartedRanks([first, *((others[index], None) for index in range(1, setup.size))], [store])


def _accepted(listener: Listener, count: int) -> dict[int, Connection]:
    """The connections of the ranks on torchrun's other processes, by rank."""
    found: dict[int, Connection] = {}
    listener._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]
    while len(found) < count:
        try:
            connection = listener.accept()
            hello = pickle.loads(connection.recv_bytes())
        except OSError as error:
            raise EngineError(
                f"of {count} other ranks {len(found)} have come within {START_SECONDS:g} s ({told(error)}): look at "
                "their output"
            ) from error
        assert isinstance(hello, Hello)
        found[hello.rank] = connection
    return found


def _become_rank(store: dist.TCPStore, setup: RankSetup) -> NoReturn:
    """Serve the engine of the first process until it ends, then end this process."""
    host, port, key = json.loads(store.get(ENGINE_KEY))
    connection = Client((host, port), authkey=bytes.fromhex(key))
    connection.send_bytes(pickle.dumps(Hello(setup.rank)))
    run_rank(connection, setup)
    raise SystemExit(0)
