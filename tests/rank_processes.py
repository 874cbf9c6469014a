"""Processes that serve as ranks of one engine after the other: starting one takes seconds, most of them imports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from torch.multiprocessing import get_context

from nanovllm.features.distributed import launch
from nanovllm.features.distributed.rank import RankSetup, run_rank

CONTEXT = get_context("spawn")


class RankProcess:
    """One run of a rank in a process that is kept: to the engine, the process of that rank."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._finished = False

    @property
    def sentinel(self) -> int:
        return self._worker.process.sentinel

    @property
    def pid(self) -> int | None:
        return self._worker.process.pid

    @property
    def exitcode(self) -> int | None:
        return 0 if self._finished else self._worker.process.exitcode

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the run, or of the process."""
        with suppress(EOFError, OSError):
            if not self._finished and self._worker.control.poll(timeout):
                self._finished = self._worker.control.recv() == "finished"
        if not self._finished:
            self._worker.process.join(timeout)

    def kill(self) -> None:
        if not self._finished:
            self._worker.process.kill()


class Worker:
    """A process that waits for runs."""

    def __init__(self) -> None:
        self.control, other = CONTEXT.Pipe()
        self.process: BaseProcess = CONTEXT.Process(target=serve, args=(other,), daemon=True)
        self.process.start()
        other.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.control.close()


def serve(control: Connection) -> None:
    """The main function of a worker. The KV memory of its ranks is watched for unordered accesses."""
    from ordering_check import OrderingCheck
    from pauses import install_pauses
    from waiting import be_patient

    from nanovllm import build

    install_pauses()
    be_patient(pytest.MonkeyPatch())
    create_device = build.create_device
    build.create_device = lambda name: OrderingCheck(create_device(name))
    with suppress(EOFError):
        while True:
            run_rank(*control.recv())
            control.send("finished")


def child_pids(parent: int) -> list[int]:
    """Processes that a process has started and that have not ended, in the order of their start."""
    children = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and fields[0] != "Z":
                children.append((int(fields[19]), int(entry.name)))
    return [pid for _, pid in sorted(children)]


def rank_pids(parent: int) -> list[int]:
    """The ranks among the children of a process, in order."""
    return [pid for pid in child_pids(parent) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def is_running(pid: int) -> bool:
    """Whether a process has not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def kept_rank_processes() -> Iterator[None]:
    """Engines within this context run their ranks in processes that are started once."""
    workers: dict[int, Worker] = {}

    def spawn(setup: RankSetup) -> tuple[Connection, RankProcess]:
        worker = workers.get(setup.rank)
        if worker is None or not worker.process.is_alive():
            worker = workers[setup.rank] = Worker()
        own, other = CONTEXT.Pipe()
        worker.control.send((other, setup))
        other.close()
        return own, RankProcess(worker)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_spawn", spawn)
        try:
            yield
        finally:
            for worker in workers.values():
                worker.end()
