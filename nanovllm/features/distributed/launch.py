"""Starting ranks: as processes of this machine, or those that torchrun has started on one machine or several."""

from __future__ import annotations

import json
import multiprocessing.process
import os
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.process import BaseProcess
from typing import NoReturn

import torch.distributed as dist
from torch.multiprocessing import get_context

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, EngineError, told
from nanovllm.features.distributed.rank import LOOPBACK, Channel, MakePart, MakeRunner, RankSetup, of_attempt, run_rank
from nanovllm.models.network_config import NetworkConfig

START_SECONDS = 300.0  # until ranks on other machines have come
ENGINE_KEY = "nanovllm-engine"  # in torchrun's store: where the engine listens
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank as the engine sees it. process: None if torchrun has started it."""

    index: int
    channel: Channel
    process: BaseProcess | None


def start_ranks(
    config: EngineConfig, network: NetworkConfig, make_runner: MakeRunner, make_part: MakePart | None
) -> tuple[list[Rank], list[dist.TCPStore]]:
    """All ranks, in order, and the store that they need while they run.

    network: of the whole model. The store is in a list: emptying that closes its port, even if an error's traceback
    still refers to it. Does not return in a process that torchrun has started as a rank other than the first.
    """
    size = config.tensor_parallel_size
    if config.distributed_executor_backend == "external_launcher":
        _check_torchrun(size)
        connections, store = _start_with_torchrun(config, network, make_runner, make_part)
    else:
        store, port = local_store()
        setups = [
            RankSetup(config, network, make_runner, rank, rank, size, LOOPBACK, port, make_part) for rank in range(size)
        ]
        connections = [_spawn(setup) for setup in setups]
    ranks = [Rank(index, Channel(connection), process) for index, (connection, process) in enumerate(connections)]
    return ranks, [store]


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


def _store(host: str, port: int, *, is_master: bool, listening: socket.socket | None = None) -> dist.TCPStore:
    descriptor = None if listening is None else listening.detach()
    timeout = timedelta(seconds=START_SECONDS)
    return dist.TCPStore(
        host, port, is_master=is_master, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor
    )


# ---- torchrun


def _check_torchrun(size: int) -> None:
    """Raise ConfigError if torchrun's variables are missing or do not fit."""
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(
            f"distributed_executor_backend='external_launcher': {', '.join(missing)} is not set, as torchrun sets it; "
            "start the program with torchrun, or leave the argument out"
        )
    if os.environ["WORLD_SIZE"] != str(size):
        started = os.environ["WORLD_SIZE"]
        raise ConfigError(f"tensor_parallel_size={size}: torchrun has started {started} ranks; make both numbers equal")


def _start_with_torchrun(
    config: EngineConfig, network: NetworkConfig, make_runner: MakeRunner, make_part: MakePart | None
) -> tuple[list[tuple[Connection, BaseProcess | None]], dist.TCPStore]:
    given = os.environ
    rank = int(given["RANK"])
    host = given["MASTER_ADDR"]
    port = int(given["MASTER_PORT"])
    local_rank = int(given["LOCAL_RANK"])
    local_size = int(given["LOCAL_WORLD_SIZE"])
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
    setup = RankSetup(config, network, make_runner, rank, local_rank, local_size, host, port, make_part)
    if rank != 0:
        _become_rank(store, setup)
    key = secrets.token_bytes(32)
    with Listener((host, 0), backlog=setup.size, authkey=key) as listener:
        of_attempt(store).set(ENGINE_KEY, json.dumps([*listener.address, key.hex()]))
        first = _spawn(setup)
        others = _accepted(listener, setup.size - 1)
    return [first, *((others[index], None) for index in range(1, setup.size))], store


def _accepted(listener: Listener, count: int) -> dict[int, Connection]:
    """The connections of the ranks on torchrun's other processes, by rank."""
    connections: dict[int, Connection] = {}
    deadline = time.monotonic() + START_SECONDS
    while len(connections) < count:
        left = max(0.001, deadline - time.monotonic())
        listener._listener._socket.settimeout(left)  # type: ignore[attr-defined]
        try:
            connection = without_delay(listener.accept())
            connections[connection.recv()] = connection
        except (AuthenticationError, EOFError, ConnectionError):
            continue  # no rank: others that reach the port may try it
        except OSError as error:
            raise EngineError(
                f"of {count} other ranks {len(connections)} have come within {START_SECONDS:g} s ({told(error)}): look "
                "at their output"
            ) from error
    return connections


def without_delay(connection: Connection) -> Connection:
    """The connection, whose messages are sent at once. Else the end of a long one waits for an acknowledgement."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _become_rank(store: dist.TCPStore, setup: RankSetup) -> NoReturn:
    """Serve the engine of the first process until it ends, then end this process."""
    try:
        host, port, key = json.loads(of_attempt(store).get(ENGINE_KEY))
    except RuntimeError as error:  # of torch.distributed
        raise EngineError(
            f"the engine in the first rank's process has not come within {START_SECONDS:g} s: look at its output"
        ) from error
    connection = without_delay(Client((host, port), authkey=bytes.fromhex(key)))
    connection.send(setup.rank)
    run_rank(connection, setup)
    raise SystemExit(0)
