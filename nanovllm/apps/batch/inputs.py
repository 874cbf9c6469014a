"""The rows of JSON-lines and Parquet files, read as they are needed and numbered through all files of a job."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from nanovllm.apps.batch.rows import Row
from nanovllm.errors import MOST_QUOTED, ConfigError, EngineError, one_line, told

if TYPE_CHECKING:
    import pyarrow

JSONL = "jsonl"
PARQUET = "parquet"
FORMAT_OF_ENDING = {".jsonl": JSONL, ".ndjson": JSONL, ".parquet": PARQUET}
READ_ROWS = 64  # rows of a Parquet file that are decoded at a time
HASHED = 1 << 20  # bytes at both ends of a file that identify it, with its size


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive rows of a file, such as one actor of a cluster answers."""

    path: Path
    index: int  # of the first row among all rows of the job
    number: int  # of the first row in its file, from 1: the line, or the row of a table
    start: int  # where they begin: bytes of the file, or rows of the row group
    group: int  # the row group of a Parquet file
    count: int
    done: frozenset[int] = frozenset()  # indices of rows that are left out


@dataclass(frozen=True, slots=True)
class Inputs:
    """The input files of a job, all of one format."""

    format: str
    files: tuple[Path, ...]

    def slices(self, most_rows: int = sys.maxsize) -> Iterator[Slice]:
        """All rows in slices of at most so many. Reads JSON lines to count them."""
        index = 0
        for path in self.files:
            for part in (_line_slices if self.format == JSONL else _table_slices)(path, index, most_rows):
                index = part.index + part.count
                yield part

    def fingerprint(self) -> list[dict[str, Any]]:
        """What tells these files from others: sizes, and hashes of their first and last MiB."""
        return [_fingerprint(path) for path in self.files]

    def schema(self) -> pyarrow.Schema | None:
        """The columns of Parquet files; None for JSON lines."""
        return None if self.format == JSONL else _parquet(self.files[0]).schema_arrow

    def rows(self, part: Slice, used_columns: Collection[str]) -> Iterator[Row]:
        """The rows of a slice that are not done, in order. A row that cannot be read has an error.

        Raises EngineError for a file that cannot be read further.
        """
        try:
            yield from (_json_rows if self.format == JSONL else _table_rows)(part, used_columns)
        except (OSError, ValueError) as error:  # pyarrow's errors are of these types
            raise EngineError(
                f"{str(part.path)!r} cannot be read further: {told(error)}; get the file anew, and resume"
            ) from error


def open_inputs(paths: Sequence[str]) -> Inputs:
    """Find the files of paths and directories, and check that they can be read. Raises ConfigError."""
    files = [file for path in paths for file in _files(Path(path))]
    formats = {FORMAT_OF_ENDING[file.suffix] for file in files}
    if len(formats) > 1:
        raise ConfigError("--input names JSON lines and Parquet files: run one job for each format")
    (file_format,) = formats
    if file_format == PARQUET:
        check_pyarrow()
        try:
            schemas = [_parquet(file).schema_arrow for file in files]
        except (OSError, ValueError) as error:  # pyarrow's errors are of these types
            raise ConfigError(f"--input cannot be read as Parquet: {told(error)}") from None
        for file, schema in zip(files, schemas, strict=True):
            if not schema.equals(schemas[0]):
                raise ConfigError(f"{str(file)!r} has other columns than {str(files[0])!r}: run one job for each")
    return Inputs(file_format, tuple(file.absolute() for file in files))  # workers run in other directories


def check_pyarrow() -> None:
    """Raise ConfigError if Parquet cannot be read."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError("Parquet files need pyarrow: pip install 'nanovllm[parquet]'")


def _files(path: Path) -> list[Path]:
    files = [path]
    if path.is_dir():  # where other names are not data, for all readers of such directories
        files = sorted(file for file in path.glob("[!_.]*") if file.suffix in FORMAT_OF_ENDING)
    if not files or not all(file.is_file() and file.suffix in FORMAT_OF_ENDING for file in files):
        endings = ", ".join(FORMAT_OF_ENDING)
        raise ConfigError(f"--input {str(path)!r} is neither a file named {endings} nor a directory of such files")
    return files


def _fingerprint(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    hasher = xxhash.xxh3_64()
    with path.open("rb") as file:
        hasher.update(file.read(HASHED))
        file.seek(max(0, size - HASHED))
        hasher.update(file.read(HASHED))
    return {"name": path.name, "bytes": size, "hash": hasher.hexdigest()}


# ---- JSON lines


def _line_slices(path: Path, index: int, most_rows: int) -> Iterator[Slice]:
    first = (1, 0)  # line and byte at which the next slice begins
    offset = count = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            is_row = bool(line.strip())  # blank lines are none
            if is_row and count == 0:
                first = (number, offset)
            count += is_row
            offset += len(line)
            if count == most_rows:
                yield Slice(path, index, *first, 0, count)
                index += count
                count = 0
    if count:
        yield Slice(path, index, *first, 0, count)


def _json_rows(part: Slice, used_columns: Collection[str]) -> Iterator[Row]:
    with part.path.open("rb") as file:
        file.seek(part.start)
        lines = ((number, line) for number, line in enumerate(file, start=part.number) if line.strip())
        for index, (number, line) in enumerate(islice(lines, part.count), start=part.index):
            if index not in part.done:
                yield _json_row(index, f"{part.path.name} line {number}", line, used_columns)


def _json_row(index: int, source: str, content: bytes, used_columns: Collection[str]) -> Row:
    text = content.rstrip(b"\r\n").decode("utf-8", "backslashreplace")
    try:
        value = json.loads(content)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # as it will be written
    except (ValueError, RecursionError) as failure:
        error = f"it is not JSON: {told(failure)}"
    else:
        if isinstance(value, dict):
            used = {name: value[name] for name in value if name in used_columns}
            return Row(index, source, used, value)
        error = f"it must be a JSON object, got {one_line(text, MOST_QUOTED)}"
    return Row(index, source, {}, {"line": text}, error)


# ---- Parquet


def _parquet(path: Path) -> pyarrow.parquet.ParquetFile:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path)


def _table_slices(path: Path, index: int, most_rows: int) -> Iterator[Slice]:
    """Slices within row groups, so that a reader decodes no other group."""
    metadata = _parquet(path).metadata
    number = 1
    for group in range(metadata.num_row_groups):
        num_rows = metadata.row_group(group).num_rows
        for start in range(0, num_rows, most_rows):
            count = min(most_rows, num_rows - start)
            yield Slice(path, index, number, start, group, count)
            index += count
            number += count


def _table_rows(part: Slice, used_columns: Collection[str]) -> Iterator[Row]:
    """A row's data is a table of one row, so that every column is written as it was read."""
    index = part.index - part.start
    end = part.index + part.count
    for batch in _parquet(part.path).iter_batches(READ_ROWS, row_groups=[part.group]):
        used = batch.select([name for name in batch.schema.names if name in used_columns])
        for row in range(batch.num_rows):
            if part.index <= index < end and index not in part.done:
                source = f"{part.path.name} row {part.number + index - part.index}"
                yield Row(index, source, python_row(used, row), batch.take([row]))
            index += 1
        if index >= end:
            return


def python_row(table: pyarrow.RecordBatch | pyarrow.Table, index: int) -> dict[str, Any]:
    """A row of a table by the names of its columns."""
    return {name: _as_python(table.column(name)[index]) for name in table.schema.names}


def _as_python(value: Any) -> Any:
    """The value of a cell; a map, which has pairs, as a dict."""
    import pyarrow

    cell = value.as_py()
    return _without_nulls(dict(cell) if cell is not None and pyarrow.types.is_map(value.type) else cell)


def _without_nulls(value: Any) -> Any:
    """Objects of a table have all keys of their column: those without a value were not given."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
