"""The loop of a job: rows to replicas, results to the output directory, rows of lost workers to others.

A row is in one place at a time: waiting in the router, with one replica, or done. Results are taken only from the
worker that was last given the row, so a row whose worker is lost is computed again and written once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from nanovllm.apps.batch.replica import Replica
from nanovllm.apps.batch.results import ResultDirectory
from nanovllm.apps.batch.router import Router, WaitingRow, prefix_hashes
from nanovllm.apps.batch.rows import Row, RowFormat, RowRequest, RowResult, failed_result
from nanovllm.data.progress import Progress
from nanovllm.errors import EngineError, RequestError, as_request_error

WINDOW = 2  # most rows with a replica, as a multiple of max_num_seqs, so that one is always ready to run
IDLE = 4  # a replica with fewer than max_num_seqs / IDLE rows has too little to do
WAITING_ROWS = 1024
SUSPECT_LOSSES = 2  # workers lost with a row, from which on it runs alone
MOST_LOSSES = 3
MOST_EMPTY_LIVES = 6  # workers of a replica lost one after the other without a row that ended


@dataclass(slots=True)
class Results:
    """Rows that ended on a replica."""

    replica: int
    results: list[RowResult]


@dataclass(slots=True)
class Lost:
    """A replica's worker was lost with all rows that it had. Another one is being started in its place."""

    replica: int
    reason: str


class Replicas(Protocol):
    """The replicas of a job, by number."""

    def progress(self, step_share: float) -> Progress:
        """How far the rows of all replicas are; step_share: as of `LLMEngine.progress`."""
        ...

    def ready(self) -> Collection[int]:
        """The replicas that can take rows."""
        ...

    def submit(self, replica: int, requests: list[RowRequest]) -> None: ...

    def wait(self) -> list[Results | Lost]:
        """What has happened; waits a moment if nothing has. Raises EngineError if no replica can be had any more."""
        ...

    def retire(self, replica: int) -> None:
        """Start no worker for this replica any more."""
        ...


class LocalReplica:
    """One replica, in this process."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._failed: list[RowResult] = []

    def progress(self, step_share: float) -> Progress:
        return self.replica.llm.engine.progress(step_share)

    def ready(self) -> Collection[int]:
        return (0,)

    def submit(self, replica: int, requests: list[RowRequest]) -> None:
        self._failed += self.replica.add(requests)

    def wait(self) -> list[Results | Lost]:
        results = self._failed
        self._failed = []
        if self.replica.has_work:
            results += self.replica.step()
        return [Results(0, results)]

    def retire(self, replica: int) -> None:
        """A replica in this process is never lost."""


@dataclass
class Job:
    """Runs the rows of a job that are not done.

    max_num_seqs: of each replica. by_prefix: rows that begin alike go to one replica; False takes rows as they come.
    on_result is called with each result that was written or waits for its part; on_turn after each turn of the loop;
    on_loss with a sentence about a lost worker. interruptible: entered while the loop waits.
    """

    rows: Iterator[Row]
    row_format: RowFormat
    output: ResultDirectory
    replicas: Replicas
    max_num_seqs: int
    by_prefix: bool = True
    on_result: Callable[[Row, RowResult], None] = lambda row, result: None
    on_turn: Callable[[], None] = lambda: None
    on_loss: Callable[[str], None] = lambda sentence: None
    interruptible: Callable[[], AbstractContextManager[None]] = nullcontext
    _router: Router = field(default_factory=Router)
    _running: dict[int, dict[int, WaitingRow]] = field(default_factory=dict)  # by replica and index
    _suspects: list[WaitingRow] = field(default_factory=list)  # rows that run alone
    _empty_lives: dict[int, int] = field(default_factory=dict)  # by replica
    _has_read_all: bool = False
    _has_ended_rows: bool = False  # on a replica

    def run(self) -> None:
        """Run to the end. Whatever ends it early, results that came are written when `output` is left."""
        while self._has_rows():
            self._assign()
            with self.interruptible():
                events = self.replicas.wait()
            for event in events:
                if isinstance(event, Lost):
                    self._lose(event)
                else:
                    self._take(event)
            self.output.flush_if_due()
            self.on_turn()
        self.output.finish()

    def _has_rows(self) -> bool:
        self._read_ahead()
        return bool(len(self._router) or self._suspects or any(self._running.values()))

    def _read_ahead(self) -> None:
        """Read rows until enough of them wait. A row that makes no request has its result."""
        while not self._has_read_all and len(self._router) < WAITING_ROWS:
            row = next(self.rows, None)
            if row is None:
                self._has_read_all = True
                return
            try:
                self._router.add(self._waiting(row))
            except RequestError as error:
                self._write(row, failed_result(row.index, f"{row.source}: {error}"))

    def _waiting(self, row: Row) -> WaitingRow:
        """The row with its request. Raises RequestError, whatever is wrong with it."""
        with as_request_error("the row cannot be read"):
            request = self.row_format.request(row)
            return WaitingRow(row, request, prefix_hashes(request.prefix_parts()) if self.by_prefix else ())

    # ---- rows to replicas

    def _assign(self) -> None:
        """Give rows to replicas, one at a time to the one with the fewest, so that none waits for another's."""
        ready = [replica for replica in self.replicas.ready() if not self._runs_suspect(replica)]
        if self._suspects and ready:
            chosen = min(ready, key=lambda number: len(self._running.get(number, ())))
            ready.remove(chosen)
            self._run_suspect(chosen)
        given: dict[int, list[RowRequest]] = {}
        while ready:
            replica = min(ready, key=lambda number: len(self._running.get(number, ())))
            waiting = self._next(replica)
            if waiting is None:
                ready.remove(replica)
                continue
            self._running.setdefault(replica, {})[waiting.row.index] = waiting
            given.setdefault(replica, []).append(waiting.request)
        for replica, requests in given.items():
            self.replicas.submit(replica, requests)

    def _next(self, replica: int) -> WaitingRow | None:
        num_rows = len(self._running.get(replica, {}))
        if num_rows >= WINDOW * self.max_num_seqs:
            return None
        return self._router.take(replica, is_idle=IDLE * num_rows < self.max_num_seqs)

    def _runs_suspect(self, replica: int) -> bool:
        return any(waiting.losses >= SUSPECT_LOSSES for waiting in self._running.get(replica, {}).values())

    def _run_suspect(self, replica: int) -> None:
        """Once the replica has no other row, run a row alone, so that it is lost only through that row.

        One that was lost least; after a loss one from the other end, since rows that kill are often neighbours.
        """
        if not self._running.get(replica):
            least = min(waiting.losses for waiting in self._suspects)
            rows = [waiting for waiting in self._suspects if waiting.losses == least]
            waiting = rows[-1] if self._empty_lives.get(replica, 0) % 2 else rows[0]
            self._suspects.remove(waiting)
            self._running[replica] = {waiting.row.index: waiting}
            self.replicas.submit(replica, [waiting.request])

    # ---- what comes back

    def _take(self, event: Results) -> None:
        running = self._running.get(event.replica, {})
        for result in event.results:
            waiting = running.pop(result.index, None)
            if waiting is None:
                raise EngineError(f"replica {event.replica} answered row {result.index}, which it was not given")
            self._empty_lives[event.replica] = 0
            self._has_ended_rows = True
            if result.error is not None:
                result.columns["error"] = f"{waiting.row.source}: {result.error}"
            self._write(waiting.row, result)

    def _lose(self, event: Lost) -> None:
        lost = list(self._running.pop(event.replica, {}).values())
        self._router.forget(event.replica)
        rows = f"with {len(lost)} rows, which run again" if lost else "without rows"
        self.on_loss(f"a worker of replica {event.replica} was lost {rows}: {event.reason}")
        again = []
        lives = self._empty_lives[event.replica] = self._empty_lives.get(event.replica, 0) + 1
        for waiting in lost:
            waiting.losses += 1
            # Where no row has ended at all, the fault is hardly that of this row.
            if waiting.losses >= MOST_LOSSES and len(lost) == 1 and self._has_ended_rows:
                what = f"{waiting.losses} workers were lost while they ran this row: {event.reason}"
                self._write(waiting.row, failed_result(waiting.row.index, f"{waiting.row.source}: {what}"))
                lives = self._empty_lives[event.replica] = 0  # the row was at fault, and it has ended
            elif waiting.losses >= SUSPECT_LOSSES:
                self._suspects.append(waiting)
            else:
                again.append(waiting)
        self._router.add_first(again)
        if lives >= MOST_EMPTY_LIVES:
            self.on_loss(f"replica {event.replica} is given up: {lives} workers were lost without a row that ended")
            self.replicas.retire(event.replica)

    def _write(self, row: Row, result: RowResult) -> None:
        self.on_result(row, self.output.add(row, result))
        self.output.flush_if_due()
