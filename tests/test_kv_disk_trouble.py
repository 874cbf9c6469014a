"""KV blocks on disk: damaged files, disks that fail or do not answer, killed processes, little space: misses."""

from __future__ import annotations

import errno
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture
from engines import random_prompt
from fast import fast_only
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_disk_helpers import (
    CHECKPOINT,
    PROMPT,
    VOCAB,
    ask,
    engine,
    numbers,
    run,
    segments,
    unanswered,
    written_fixture,
)

from nanovllm.apps.cli.main import main
from nanovllm.features.kv_disk import loading, part, under_way, verify
from nanovllm.features.kv_disk import segments as segments_module
from nanovllm.features.kv_disk import writing as writing_module
from nanovllm.features.kv_disk.identity import FileDigests
from nanovllm.features.kv_disk.inspect import ABOUT, DIGESTS
from nanovllm.features.kv_disk.segments import SegmentReader, SegmentWriter
from nanovllm.features.kv_disk.writing import WriterThread

model = checkpoint_fixture(**CHECKPOINT)
written = written_fixture()


@given(data=st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files_are_misses(model: Path, written: tuple[Path, Any], data: st.DataObject) -> None:
    """A flipped bit, a cut, longer or deleted file: the same answer, and what is damaged is seen by `verify`."""
    source, expected = written
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "kv"
        shutil.copytree(source, directory)
        (path,) = segments(directory)
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        change = data.draw(st.sampled_from(("flip", "cut", "extend", "delete")))
        if change == "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content[:at] if change == "cut" else content + content[:at] * (change == "extend"))
        if change == "delete":
            path.unlink()
        assert change != "flip" or any(each.damaged for each in verify(directory))
        for _ in range(2):
            assert numbers(run(model, directory)) == expected
        assert run(model, directory).metrics.cached_tokens_disk == 768


@pytest.mark.parametrize("call", ["writev", "open", "preadv", "pread"])
def test_failing_files_are_misses(
    model: Path,
    written: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    """A full or read-only disk, and one that cannot be read: said once."""
    source, expected = written
    shutil.copytree(source, tmp_path / "kv")
    if call in ("writev", "open"):
        for path in segments(tmp_path / "kv"):
            path.unlink()
    known = getattr(os, call)

    def fail(*arguments: Any) -> Any:
        if call == "open" and not str(arguments[0]).endswith(".kv"):
            return known(*arguments)
        code = errno.ENOSPC if call == "writev" else errno.EIO
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(segments_module.os, call, fail)
    found = run(model, tmp_path / "kv")
    assert (found.metrics.cached_tokens_disk, numbers(found)) == (0, expected)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_a_read_only_file_system_is_read(
    model: Path,
    written: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also by the first engine that finds the model at another path, and has to compute the digest of its files."""
    shutil.copytree(written[0], tmp_path / "kv")
    shutil.copytree(model, tmp_path / "model")
    opened = os.open
    unlinked = Path.unlink

    def refuse(path: Any) -> None:
        if str(path).startswith(str(tmp_path / "kv")):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def open_file(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refuse(path)
        return opened(path, flags, *arguments, **named)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        refuse(path)  # Linux says so before it looks for the file
        unlinked(path, missing_ok)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(Path, "unlink", unlink)
    for prompt, stored in ((None, 768), (random_prompt(600, VOCAB, 4), 0)):
        found = run(tmp_path / "model", tmp_path / "kv", prompt)
        assert found.metrics.cached_tokens_disk == stored
        assert stored == 0 or numbers(found) == written[1]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "nothing more is written" in warnings[0], warnings


def test_a_segment_that_cannot_be_read_hides_no_other(
    model: Path, written: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(written[0], tmp_path / "kv")
    (segments(tmp_path / "kv")[0].parent / "0.kv").mkdir()
    found = run(model, tmp_path / "kv")
    assert (found.metrics.cached_tokens_disk, numbers(found)) == (768, written[1])
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "0.kv: Is a directory" in warning


def test_what_cannot_be_read_is_damaged_and_can_be_removed(
    written: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(written[0], tmp_path / "kv")
    (path,) = segments(tmp_path / "kv")
    # a sector
    pread = os.pread
    bad = path.stat().st_size // 2

    def read(fd: int, length: int, at: int) -> bytes:
        if at <= bad < at + length:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, length, at)

    monkeypatch.setattr(os, "pread", read)
    assert main(["cache", "verify", str(tmp_path / "kv")]) == 1 and "damaged" in capsys.readouterr().out
    (kept,) = verify(tmp_path / "kv")
    assert kept.tokens == 256 and kept.damaged is not None and kept.damaged > kept.size // 2
    assert main(["cache", "rm", str(tmp_path / "kv")]) == 0 and not segments(tmp_path / "kv")


def set_patience(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(under_way, "PATIENCE_SECONDS", seconds)
    monkeypatch.setattr(part, "PULSE_SECONDS", seconds / 10)
    monkeypatch.setattr(loading, "CLOSE_SECONDS", seconds)
    monkeypatch.setattr(writing_module, "STALL_SECONDS", seconds)


@pytest.mark.parametrize("call", ["preadv", "open", "utime", "writev"])
def test_a_disk_that_does_not_answer_keeps_nobody_waiting(
    model: Path,
    written: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    """Its tokens are computed, after a while for a read, and the engine is closed while calls still hang."""
    shutil.copytree(written[0], tmp_path / "kv")
    known = getattr(os, call)
    answers = threading.Event()

    def hang(*arguments: Any, **options: Any) -> Any:
        if call != "open" or str(arguments[0]).endswith(".kv"):
            assert answers.wait(60)
        return known(*arguments, **options)

    found = []
    reads = call in ("preadv", "open")
    with engine(model, tmp_path / "kv") as llm:
        set_patience(monkeypatch, 0.05)
        if not reads:  # then what is read comes, however late
            monkeypatch.setattr(under_way, "PATIENCE_SECONDS", 60.0)
        monkeypatch.setattr(segments_module.os, call, hang)
        for prompt in (PROMPT, random_prompt(600, VOCAB, 7), PROMPT[:300]):
            found.append(ask(llm, prompt))
    answers.set()
    assert numbers(found[0]) == written[1]
    assert found[0].metrics.cached_tokens_disk == (0 if reads else 768)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("has not answered" in warning for warning in warnings) == reads


def test_work_that_ends_says_nothing_of_what_began_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call hangs in one thread, while others find that the disk answers."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    work = under_way.UnderWay(1)
    for number in range(1, 6):
        work.begin(number)
    now = 0.9 * under_way.PATIENCE_SECONDS
    work.ended(0, 1)  # the next one may have waited for it
    now *= 2
    assert not work.is_stuck
    for number in (3, 4):
        work.ended(0, number)
    now += 0.2 * under_way.PATIENCE_SECONDS
    assert work.is_stuck
    work.ended(0, 2)
    assert not work.is_stuck


def test_a_disk_that_does_not_answer_at_the_start_is_not_used(
    model: Path,
    written: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shutil.copytree(written[0], tmp_path / "kv")
    with monkeypatch.context() as patch, unanswered(segments(tmp_path / "kv")[0]):
        set_patience(patch, 0.5)
        found = run(model, tmp_path / "kv")
    assert (found.metrics.cached_tokens_disk, numbers(found)) == (0, written[1])
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "is not used: the disk has not answered for" in warning
    assert run(model, tmp_path / "kv").metrics.cached_tokens_disk == 768


def test_a_directory_that_cannot_be_made_or_vanishes(model: Path, written: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert numbers(run(model, tmp_path / "file" / "kv")) == written[1]
    with engine(model, tmp_path / "kv") as llm:
        shutil.rmtree(tmp_path / "kv")
        found = ask(llm)
    assert numbers(found) == written[1]


# Importing the module of `random_prompt` takes seconds.
KILLED = (
    f"from random import Random\n{inspect.getsource(random_prompt)}"
    """
import sys
from nanovllm import LLM, SamplingParams
engine = {"dtype": "float32", "device": "cpu", "kvcache_block_size": 128, "num_gpu_blocks": 30}
llm = LLM(sys.argv[1], kv_cache_dir=sys.argv[2], **engine)
for seed in range(1, 1000):
    llm.generate([random_prompt(850, 199, seed)], SamplingParams(max_tokens=1), use_tqdm=False)
    print(seed, flush=True)
"""
)


@pytest.mark.parametrize("delay", fast_only([0.013], [0.0, 0.013, 0.11]))
def test_a_killed_process_leaves_what_can_be_used(
    model: Path, written: tuple[Path, Any], tmp_path: Path, delay: float
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), *sys.path))}
    command = [sys.executable, "-c", KILLED, str(model), str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "1\n"
        time.sleep(delay)
        process.kill()
    verify(tmp_path)
    for _ in range(2):
        found = run(model, tmp_path)
        assert numbers(found) == written[1]
    assert found.metrics.cached_tokens_disk == 768


@pytest.mark.parametrize("name", [ABOUT, DIGESTS])
def test_a_kill_while_a_small_file_is_written_leaves_no_part_of_it(tmp_path: Path, name: str) -> None:
    """Of a killed process a draft stays, until another one writes the file much later."""

    def write() -> None:
        if name == DIGESTS:
            FileDigests(tmp_path).of([Path(__file__)])
            return
        reader = SegmentReader(tmp_path)
        failed = list[Exception]()
        writer = WriterThread(
            SegmentWriter(tmp_path, 8000), reader, {"model": "m", "rank": 0, "ranks": 1}, lambda _: None, failed.append
        )
        writer.put((bytes(32), 0), torch.zeros(9, dtype=torch.uint8))
        assert writer.close() == 0 and not failed

    if (child := os.fork()) == 0:
        json.dump = lambda *_: os._exit(7)
        write()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    drafts = [path for path in tmp_path.iterdir() if path.name.startswith(name)]
    assert len(drafts) == 1 and not (tmp_path / name).exists()
    os.utime(drafts[0], (0, 0))
    write()
    assert json.loads((tmp_path / name).read_text()) and not drafts[0].exists()


@pytest.mark.slow
@pytest.mark.parametrize(("what", "rounds"), [("kills", 10), ("mutations", 25)])
def test_random_trouble(model: Path, tmp_path: Path, what: str, rounds: int) -> None:
    """NANOVLLM_KV_DISK_ROUNDS: more of them. The script says what it does."""
    rounds = int(os.environ.get("NANOVLLM_KV_DISK_ROUNDS", rounds))
    script = Path(__file__).parent / "kv_disk_trouble.py"
    command = [sys.executable, str(script), what, str(model), str(tmp_path / "trouble"), str(rounds), "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "all answers right" in done.stdout, done.stderr[-3000:]


@pytest.mark.slow
def test_hash_seeds_and_clocks_differ(model: Path, written: tuple[Path, Any], tmp_path: Path) -> None:
    """Of processes, which find each other's records all the same; a clock may be years off."""
    code = KILLED.replace("range(1, 1000)", "(1,)").replace("    print(seed, flush=True)", "") + CLOCK
    path = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    for seed, offset in (("1", "0"), ("2", "-400000000"), ("3", "400000000")):
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed, "OFFSET": offset}
        command = [sys.executable, "-c", CLOCK_BEFORE + code, str(model), str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert int(done.stdout) == (0 if seed == "1" else 768)
    assert numbers(run(model, tmp_path)) == written[1]


CLOCK_BEFORE = """
import os, time
known = time.time_ns
time.time_ns = lambda: known() + int(os.environ["OFFSET"]) * 10**9
"""
CLOCK = """
print(llm.metrics().prefix_cache_hit_tokens_on_disk)
llm.close()
"""


def test_space_is_bounded_by_deleting_what_was_used_least_recently(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    writer = SegmentWriter(directory, 8000)
    reader = SegmentReader(directory)
    for number in range(40):
        assert writer.append((number.to_bytes(32, "little"), 0), bytes([number]) * 900) is not None
        assert sum(path.stat().st_size for path in segments(tmp_path)) <= 8000
        for path in segments(tmp_path):  # times of files may be coarse
            os.utime(path, ns=(int(path.name.split("-")[0]),) * 2)
    assert writer.append((bytes(32), 1), bytes(9000)) is None
    writer.close()
    reader.scan()
    kept = [number for number in range(40) if (number.to_bytes(32, "little"), 0) in reader]
    assert kept == list(range(40 - len(kept), 40)) and len(kept) >= 6


def test_the_command_lists_verifies_and_removes(
    written: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(written[0], tmp_path / "kv")
    (path,) = segments(tmp_path / "kv")
    assert main(["cache", "ls", str(tmp_path / "kv")]) == 0 and "768 tokens" in capsys.readouterr().out
    assert main(["cache", "verify", str(tmp_path / "kv")]) == 0
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert main(["cache", "verify", str(tmp_path / "kv")]) == 1 and "damaged" in capsys.readouterr().out
    assert main(["cache", "rm", str(tmp_path / "kv")]) == 0 and not segments(tmp_path / "kv")
    assert main(["cache", "ls", str(tmp_path / "nowhere")]) == 2
