"""The rows of JSON-lines and Parquet files, read as they are needed and numbered through all files of a job."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
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
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Inputs:
    """The input files of a job, all of one format."""

    format: str
    files: tuple[Path, ...]

    def count(self) -> int:
        """The number of rows."""
        return sum(map(_count_lines if self.format == JSONL else _count_parquet, self.files))

    def fingerprint(self) -> list[dict[str, Any]]:
        """What tells these files from others: sizes, and hashes of their first and last MiB."""
        return [_fingerprint(path) for path in self.files]

    def schema(self) -> pyarrow.Schema | None:
        """The columns of Parquet files; None for JSON lines."""
        return None if self.format == JSONL else _parquet(self.files[0]).schema_arrow

    def rows(self, is_done: Callable[[int], bool], used_columns: Collection[str]) -> Iterator[Row]:
        """The rows whose index is not done yet, in order. A row that cannot be read has an error.

        Raises EngineError for a file that cannot be read further.
        """
        read = _lines if self.format == JSONL else _parquet_rows
        index = 0
        for path in self.files:
            try:
                index = yield from read(path, index, is_done, used_columns)
            except (OSError, ValueError) as error:  # pyarrow's errors are of these types
                raise EngineError(
                    f"{str(path)!r} cannot be read further: {told(error)}; get the file anew, and resume"
                ) from error


def open_inputs(paths: Sequence[str]) -> Inputs:
    """Find the files of paths and directories, and check that they can be read. Raises ConfigError."""
    files = [file for path in paths for file in _files(Path(path))]
    formats = {FORMAT_OF_ENDING[file.suffix] for file in files}
    if len(formats) > 1:
        raise ConfigError("--input names JSON lines and Parquet files: run one job for each format")
    (found,) = formats
    if found == PARQUET:
        check_pyarrow()
    for file in files:
        try:
            file.open("rb").close()
            is_like_first = found == JSONL or _parquet(file).schema_arrow.equals(_parquet(files[0]).schema_arrow)
        except OSError as error:
            raise ConfigError(f"--input {str(file)!r} cannot be read: {error.strerror or told(error)}") from None
        except ValueError as error:
            raise ConfigError(f"--input {str(file)!r} is not a Parquet file: {told(error)}") from None
        if not is_like_first:
            raise ConfigError(f"{str(file)!r} has other columns than {str(files[0])!r}: run one job for each")
    return Inputs(found, tuple(files))


def check_pyarrow() -> None:
    """Raise ConfigError if Parquet cannot be read."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError("Parquet files need pyarrow: pip install 'nanovllm[parquet]'")


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix in FORMAT_OF_ENDING and file.is_file())
        # Names that begin so are not data, for all readers of such directories.
        found = [file for file in found if not file.name.startswith(("_", "."))]
        if not found:
            raise ConfigError(f"--input {str(path)!r} is a directory without .jsonl or .parquet files")
        return found
    if not path.exists():
        raise ConfigError(f"--input {str(path)!r} does not exist")
    if not path.is_file():
        raise ConfigError(f"--input {str(path)!r} is no regular file, which a resumed job could read again")
    if path.suffix not in FORMAT_OF_ENDING:
        raise ConfigError(f"--input {str(path)!r}: the name must end in {', '.join(FORMAT_OF_ENDING)}")
    return [path]


def _fingerprint(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    hasher = xxhash.xxh3_64()
    with path.open("rb") as file:
        hasher.update(file.read(HASHED))
        file.seek(max(0, size - HASHED))
        hasher.update(file.read(HASHED))
    return {"name": path.name, "bytes": size, "hash": hasher.hexdigest()}


# ---- JSON lines


def _count_lines(path: Path) -> int:
    return sum(1 for _ in _numbered_lines(path))


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are rows: all but blank ones."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            if content.strip():
                yield number, content


def _lines(
    path: Path, index: int, is_done: Callable[[int], bool], used_columns: Collection[str]
) -> Generator[Row, None, int]:
    """Yields the rows of a file, and returns the index of the first row after it."""
    for number, content in _numbered_lines(path):
        if not is_done(index):
            yield _json_row(index, f"{path.name} line {number}", content, used_columns)
        index += 1
    return index


def _json_row(index: int, source: str, content: bytes, used_columns: Collection[str]) -> Row:
    text = content.rstrip(b"\r\n").decode("utf-8", "backslashreplace")
    try:
        value = json.loads(content)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # as it will be written
    except UnicodeEncodeError:
        error = "it has an escape for half a surrogate pair, which is not a character"
    except UnicodeDecodeError:
        error = "it is not UTF-8"
    except (ValueError, RecursionError) as found:
        error = f"it is not JSON: {told(found)}"
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


def _count_parquet(path: Path) -> int:
    return int(_parquet(path).metadata.num_rows)


def _parquet_rows(
    path: Path, index: int, is_done: Callable[[int], bool], used_columns: Collection[str]
) -> Generator[Row, None, int]:
    """As `_lines`. A row's data is a table slice of one row, so that every column is written as it was read."""
    first = index
    for batch in _parquet(path).iter_batches(READ_ROWS):
        wanted = [i for i in range(batch.num_rows) if not is_done(index + i)]
        if wanted:
            used = batch.select([name for name in batch.schema.names if name in used_columns])
            for i in wanted:
                source = f"{path.name} row {index + i - first + 1}"
                yield Row(index + i, source, python_row(used, i), batch.slice(i, 1))
        index += batch.num_rows
    return index


def python_row(table: pyarrow.RecordBatch | pyarrow.Table, index: int) -> dict[str, Any]:
    """A row of a table by the names of its columns."""
    return {name: _as_python(table.column(name)[index]) for name in table.schema.names}


def _as_python(value: Any) -> Any:
    """The value of a cell; a map, which has pairs, as a dict."""
    import pyarrow

    found = value.as_py()
    return _without_nulls(dict(found) if found is not None and pyarrow.types.is_map(value.type) else found)


def _without_nulls(value: Any) -> Any:
    """Objects of a table have all keys of their column: those without a value were not given."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
