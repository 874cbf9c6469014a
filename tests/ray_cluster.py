"""A cluster of Ray on this machine, for tests: each node is a `ray start` of its own, small, and gone afterwards."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

ROOT = Path(__file__).parent.parent
START_SECONDS = 120
HEAD = ["--head", "--port=0", "--include-dashboard=false", "--disable-usage-stats"]
SMALL = ["--include-log-monitor=false", "--block"]
STORE_BYTES = 80 << 20  # of each node: Ray's least is 75 MiB


class Cluster:
    """A head node with the address `address`; `add_node` adds others, `kill_node` is the loss of a machine."""

    def __init__(self, num_cpus: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # sockets need a short path
        self._token = secrets.token_hex(32)
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._known: set[psutil.Process] = set()
        self.address = ""
        self._num_cpus = num_cpus

    def __enter__(self) -> Cluster:
        try:
            self._start([*HEAD, f"--temp-dir={self._folder}"], self._num_cpus)
            self.address = self._address()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill all nodes."""
        for number in reversed(range(len(self._nodes))):
            self.kill_node(number)
        for process in self._known:
            _kill(process)
        shutil.rmtree(self._folder, ignore_errors=True)

    def add_node(self, num_cpus: int) -> None:
        """Add a node, and wait until the cluster has it."""
        self._start([f"--address={self.address}"], num_cpus)
        code = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False); print(len(ray.nodes()))"
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            command = [sys.executable, "-c", code, self.address]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=self.environment)
            if self._nodes[-1].poll() is not None:
                raise TimeoutError((self._folder / f"node{len(self._nodes) - 1}.log").read_text())
            if done.stdout.strip() == str(len(self._nodes)):
                self._known.update(process for node in self._nodes for process in _tree(node.pid))
                return
        raise TimeoutError(f"the cluster has not {len(self._nodes)} nodes: {done.stdout}{done.stderr}")

    def kill_node(self, number: int) -> None:
        """kill -9 of all processes of a node."""
        processes = _tree(self._nodes[number].pid)
        for process in processes:
            _kill(process)
        self._nodes[number].wait()

    def workers(self) -> list[psutil.Process]:
        """The processes with a replica, of all nodes."""
        found = [process for node in self._nodes for process in _tree(node.pid)]
        return [process for process in found if "ReplicaActor" in _title(process)]

    def busy_workers(self) -> list[psutil.Process]:
        """Those whose replica is loaded and has rows, as their titles say."""
        return [worker for worker in self.workers() if "ReplicaActor.exchange" in _title(worker)]

    @property
    def environment(self) -> dict[str, str]:
        """Of all processes that use the cluster: one thread, this checkout, and the cluster's own token."""
        path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        return {**os.environ, **own, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token}

    def _start(self, options: list[str], num_cpus: int) -> None:
        ray = Path(sys.executable).with_name("ray")
        sizes = [f"--num-cpus={num_cpus}", "--num-gpus=0", f"--object-store-memory={STORE_BYTES}"]
        command = [str(ray), "start", *options, *sizes, *SMALL]
        output = (self._folder / f"node{len(self._nodes)}.log").open("wb")
        with output:
            self._nodes.append(
                subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, env=self.environment, start_new_session=True
                )
            )

    def _address(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with suppress(FileNotFoundError):
                address = (self._folder / "ray_current_cluster").read_text().strip()
                if address:
                    return address
            time.sleep(0.2)
        raise TimeoutError((self._folder / "node0.log").read_text())


def _tree(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.Error):
        process.send_signal(signal.SIGKILL)
