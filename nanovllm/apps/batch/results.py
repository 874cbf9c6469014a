"""The output directory of a job: results in part files, each written once and complete.

A part is written under a hidden name, synced to the disk, renamed, and its directory is synced: whenever the process or
the machine is killed, a part is there with all its rows or not at all. The rows that count as done are those in the
parts, so a job that is resumed computes the others, whatever was in memory. A lock keeps a second process out, and
a row that is done is refused, so no row is written twice.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.apps.batch.inputs import JSONL
from nanovllm.apps.batch.rows import RESULT_COLUMNS, Row, RowResult, failed_result
from nanovllm.errors import ConfigError, EngineError, told

if TYPE_CHECKING:
    import pyarrow

JOB = "_job.json"
LOCK = "_lock"
SUCCESS = "_SUCCESS"
PART = re.compile(r"part-(\d{6,})\.(jsonl|parquet)")
PART_ROWS = 1000  # most rows of a part
PART_SECONDS = 10.0  # that a result waits for its part to be written


class ResultDirectory:
    """Writes the results of a job, and knows the rows that have one. Use it as a context."""

    def __init__(
        self,
        path: str,
        file_format: str,
        schema: pyarrow.Schema | None,
        *,
        part_rows: int = PART_ROWS,
        part_seconds: float = PART_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: seconds that only grow."""
        self.done: set[int] = set()  # indices of the rows that have a result
        self.num_failed = 0  # of these
        self._path = Path(path)
        self._format = file_format
        self._schema = schema
        self._part_rows = part_rows
        self._part_seconds = part_seconds
        self._clock = clock
        self._held: list[Any] = []  # what waits for its part: lines of JSON, or rows of a table with their results
        self._held_since = 0.0
        self._next_part = 0
        self._lock: int | None = None

    def open(self, job: Mapping[str, Any], resume: bool) -> None:
        """Begin the job, or resume it if its directory has results of the same job.

        job: JSON that says what the job computes from what. Raises ConfigError if another process uses the directory,
        if it holds results and `resume` is False, or if they are another job's.
        """
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            begun = self._read_job()
            if begun is not None:
                self._check_resumed(begun, job, resume)
                self._read_parts()
            elif any(file.name not in (LOCK, f".{JOB}.tmp") for file in self._path.iterdir()):
                raise ConfigError(f"--output {str(self._path)!r} has other files: name a new or empty directory")
            else:
                self._replace(JOB, json.dumps(job, indent=1).encode())
        except OSError as error:
            self.close()
            raise ConfigError(f"--output {str(self._path)!r} cannot be used: {error.strerror or told(error)}") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ResultDirectory:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.flush()
        finally:
            self.close()

    # ---- results

    def add(self, row: Row, result: RowResult) -> RowResult:
        """Take the result of a row, which is in a part after PART_SECONDS at the latest if `flush_if_due` is called.

        Returns the result that is written: one that the format cannot represent becomes an error.
        """
        if not self._held:
            self._held_since = self._clock()
        held: Any = (row, result)
        if self._format == JSONL:
            held, result = _json_line(row, result)
        self._count(row.index, result.error is not None)
        self._held.append(held)
        return result

    def _count(self, index: int, failed: bool) -> None:
        """Count a row as done. Raises EngineError for one that is done already."""
        if index in self.done:
            raise EngineError(f"row {index} has two results")
        self.done.add(index)
        self.num_failed += failed

    def flush_if_due(self) -> None:
        """Write the results that wait if they are many, or have waited long."""
        waited = self._clock() - self._held_since
        if len(self._held) >= self._part_rows or (self._held and waited >= self._part_seconds):
            self.flush()

    def flush(self) -> None:
        """Write all results that wait as a part. Raises OSError; then they still wait."""
        if not self._held:
            return
        written = b"".join(self._held) if self._format == JSONL else self._parquet()
        self._replace(f"part-{self._next_part:06d}.{self._format}", written)
        self._held.clear()  # first, so that an interrupt leaves none that are written again
        self._next_part += 1

    def finish(self) -> None:
        """Mark the job as complete, as other batch systems do: with an empty file."""
        self.flush()
        self._replace(SUCCESS, b"")

    def close(self) -> None:
        """Let other processes use the directory. Safe to call twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ---- what is there

    def _take_lock(self) -> None:
        self._lock = os.open(self._path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--output {str(self._path)!r} is being written by another process") from None

    def _read_job(self) -> Any:
        try:
            return json.loads((self._path / JOB).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            raise ConfigError(f"{str(self._path / JOB)!r} is damaged: name a new directory") from None

    def _check_resumed(self, begun: Any, job: Mapping[str, Any], resume: bool) -> None:
        if not resume:
            raise ConfigError(
                f"--output {str(self._path)!r} has results of an earlier run: --resume computes its missing rows; or "
                "name another directory"
            )
        wanted = json.loads(json.dumps(job))
        changed = [name for name in wanted if not isinstance(begun, dict) or begun.get(name) != wanted[name]]
        if changed:
            raise ConfigError(
                f"--resume: the job in {str(self._path)!r} was begun with other values of {' and '.join(changed)}, and "
                "the results would not fit together: repeat its options, or name another directory"
            )

    def _read_parts(self) -> None:
        for file in sorted(self._path.iterdir()):
            if file.name.startswith(".part-"):  # not complete when the process was killed
                file.unlink()
            match = PART.fullmatch(file.name)
            if match is None:
                continue
            try:
                for index, failed in _done_in_part(file):
                    self._count(index, failed)
            except (ValueError, TypeError, KeyError, EngineError) as error:
                raise ConfigError(f"{str(file)!r} is damaged: {told(error)}. Remove it, and --resume") from None
            self._next_part = max(self._next_part, int(match[1]) + 1)  # names of seven digits sort before those of six

    # ---- writing

    def _parquet(self) -> bytes:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_batches([row.data for row, _ in self._held], self._schema)
        table = with_results(table, [result for _, result in self._held])
        buffer = pa.BufferOutputStream()
        pq.write_table(table, buffer)
        return bytes(buffer.getvalue())

    def _replace(self, name: str, content: bytes) -> None:
        """Write a file that is there complete or not at all, whenever the process or the machine stops."""
        hidden = self._path / f".{name}.tmp"
        try:
            with hidden.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            hidden.replace(self._path / name)
        except OSError:
            with suppress(OSError):
                hidden.unlink()
            raise
        directory = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _done_in_part(file: Path) -> Iterator[tuple[int, bool]]:
    """The rows of a part, and whether each failed."""
    if file.suffix == ".jsonl":
        with file.open("rb") as lines:
            for line in lines:
                value = json.loads(line)
                yield int(value["row_index"]), value["error"] is not None
        return
    import pyarrow.parquet as pq

    table = pq.read_table(file, columns=["row_index", "error"])
    yield from zip(table["row_index"].to_pylist(), table["error"].is_valid().to_pylist(), strict=True)


def _json_line(row: Row, result: RowResult) -> tuple[bytes, RowResult]:
    kept = {_kept_name(name, row.data): value for name, value in row.data.items()}
    try:
        return _dumped(kept | {"row_index": row.index} | result.columns), result
    except ValueError as error:  # such as log-probabilities of -inf, which JSON does not have
        result = failed_result(row.index, f"the result cannot be written as JSON: {told(error)}")
        return _dumped(kept | {"row_index": row.index} | result.columns), result


def _dumped(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _kept_name(name: str, names: Sequence[str] | Mapping[str, Any]) -> str:
    """The name of a column of the input in the output: `input.NAME` if it is the name of a result."""
    if name in RESULT_COLUMNS:
        name = f"input.{name}"
        while name in names:
            name = f"input.{name}"
    return name


def with_results(table: pyarrow.Table, results: Sequence[RowResult]) -> pyarrow.Table:
    """The table of rows with the columns of their results, of the same types whatever the rows are."""
    import pyarrow as pa

    table = table.rename_columns([_kept_name(name, table.column_names) for name in table.column_names])
    for name, kind in _result_types().items():
        values = [result.index if name == "row_index" else result.columns[name] for result in results]
        table = table.append_column(name, pa.array(values, kind))
    return table


def _result_types() -> dict[str, pyarrow.DataType]:
    import pyarrow as pa

    token = pa.struct(
        [("token_id", pa.int64()), ("logprob", pa.float64()), ("rank", pa.int64()), ("decoded_token", pa.string())]
    )
    logprobs = pa.list_(pa.list_(token))
    text = pa.string()
    count = pa.int64()
    function = pa.struct([("name", text), ("arguments", text)])
    calls = pa.list_(pa.struct([("id", text), ("type", text), ("function", function)]))
    message = pa.struct(
        [("role", text), ("content", text), ("refusal", text), ("reasoning", text), ("tool_calls", calls)]
    )
    completion = [("index", count), ("text", text), ("message", message)]
    completion += [("token_ids", pa.list_(count)), ("finish_reason", text)]
    completion += [("stop_reason", text), ("cumulative_logprob", pa.float64()), ("logprobs", logprobs)]
    usage = [("prompt_tokens", count), ("completion_tokens", count), ("total_tokens", count)]
    usage += [("prompt_tokens_details", pa.struct([("cached_tokens", count)]))]
    return {
        "row_index": count,
        "generated_text": text,
        "finish_reason": text,
        "outputs": pa.list_(pa.struct(completion)),
        "prompt_logprobs": logprobs,
        "usage": pa.struct(usage),
        "error": text,
    }
