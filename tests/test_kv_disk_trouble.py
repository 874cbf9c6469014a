"""KV blocks on disk: damaged files, disks that fail or do not answer, killed processes, little space: misses."""

from __future__ import annotations

import errno
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
from checkpoints import checkpoint_fixture
from engines import random_prompt
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
    stored_files,
    unanswered,
    written_fixture,
)

from nanovllm.apps.cli.main import main
from nanovllm.features.kv_disk import files, kept_in, part, store
from nanovllm.features.kv_disk.files import ABANDONED_SECONDS, DIGESTS, Space
from nanovllm.features.kv_disk.part import DiskThreads, StorePart

model = checkpoint_fixture(**CHECKPOINT)
written = written_fixture()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@given(data=st.data())
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files_are_misses(model: Path, written: tuple[Path, Any], data: st.DataObject) -> None:
    """A flipped bit, a cut, longer, foreign or deleted file: the same answer, seen by `verify`, and written anew."""
    source, expected = written
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "kv"
        shutil.copytree(source, directory)
        path, other, _ = data.draw(st.permutations(stored_files(directory)))
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        change = data.draw(st.sampled_from(("flip", "cut", "extend", "foreign", "delete")))
        if change == "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        elif change == "cut":
            del content[at:]
        elif change == "extend":
            content += content[: at + 1]
        elif change == "foreign":
            content[:] = other.read_bytes()
        path.write_bytes(content)
        if change == "delete":
            path.unlink()
        assert any(kept.damaged for kept in kept_in(directory, verify=True)) == (change != "delete")
        for _ in range(2):
            found = run(model, directory)
            assert numbers(found) == expected
        assert found.metrics.cached_tokens_disk == 768


@pytest.mark.parametrize("call", ["read", "write"])
def test_failing_files_are_misses(
    model: Path,
    written: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    """A full disk, and one that cannot be read: said once."""
    if call == "read":
        shutil.copytree(written[0], tmp_path / "kv")

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(files, call, fail)
    found = run(model, tmp_path / "kv")
    assert (found.metrics.cached_tokens_disk, numbers(found)) == (0, written[1])
    assert len(warnings_of(caplog)) == 1


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

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(files, "replace", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    for prompt, stored in ((None, 768), (random_prompt(600, VOCAB, 4), 0)):
        found = run(tmp_path / "model", tmp_path / "kv", prompt)
        assert found.metrics.cached_tokens_disk == stored
        assert stored == 0 or numbers(found) == written[1]
    (warning,) = warnings_of(caplog)
    assert "nothing is written for 60 s" in warning


@pytest.mark.parametrize("call", ["read", "look", "write"])
def test_a_disk_that_does_not_answer_keeps_nobody_waiting(
    model: Path,
    written: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    """Tokens are computed, and the engine is closed while calls still hang. What hangs until the end is late."""
    shutil.copytree(written[0], tmp_path / "kv")
    answers = threading.Event()
    room, name = (StorePart, "_look") if call == "look" else (files, call)
    known = getattr(room, name)

    def hang(*arguments: Any) -> Any:
        assert answers.wait(60)
        return known(*arguments)

    monkeypatch.setattr(room, name, hang)
    found = []
    with engine(model, tmp_path / "kv") as llm:
        if call != "write":  # else what is read comes, however late
            monkeypatch.setattr(store, "LATE_SECONDS", 0.05)
        monkeypatch.setattr(part, "CLOSE_SECONDS", 0.05)
        for prompt in (PROMPT, random_prompt(600, VOCAB, 7), PROMPT[:300]):
            found.append(ask(llm, prompt))
    answers.set()
    assert numbers(found[0]) == written[1]
    assert found[0].metrics.cached_tokens_disk == (768 if call == "write" else 0)
    assert sum("has not answered" in warning for warning in warnings_of(caplog)) == (call == "read")


def test_a_disk_that_answers_again_is_read(
    model: Path, written: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that was late is computed; a later one reads."""
    shutil.copytree(written[0], tmp_path / "kv")
    path = stored_files(tmp_path / "kv")[0]
    with engine(model, tmp_path / "kv") as llm:
        with monkeypatch.context() as patch, unanswered(path):
            patch.setattr(store, "LATE_SECONDS", 0.05)
            late = ask(llm)
        llm.reset_prefix_cache()
        found = ask(llm)
    assert [output.metrics.cached_tokens_disk for output in (late, found)] == [0, 768]
    assert numbers(late) == numbers(found) == written[1]


def test_the_oldest_work_says_whether_the_disk_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call hangs in one thread, while others find that the disk answers."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(store, "LATE_SECONDS", 1.0)
    work = store.UnderWay()
    for number in range(3):
        work.begin(number, num_answers=2)
    now = 0.9
    work.answered(0)
    now = 1.8
    assert not work.is_late
    work.answered(0)  # the next one may have waited for it
    now = 2.7
    assert not work.is_late and 0 not in work
    for _ in range(2):
        work.answered(2)
    now = 2.9
    assert work.is_late
    work.answered(1)
    assert not work.is_late


def test_a_disk_that_does_not_answer_at_the_start_is_not_used(
    model: Path,
    written: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shutil.copytree(written[0], tmp_path / "kv")
    with monkeypatch.context() as patch, unanswered(tmp_path / "kv" / DIGESTS):
        patch.setattr(store, "OPEN_SECONDS", 0.05)
        found = run(model, tmp_path / "kv")
    assert (found.metrics.cached_tokens_disk, numbers(found)) == (0, written[1])
    (warning,) = warnings_of(caplog)
    assert "is not used: the disk has not answered for" in warning
    assert run(model, tmp_path / "kv").metrics.cached_tokens_disk == 768


def test_a_directory_that_cannot_be_made_or_vanishes(model: Path, written: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert numbers(run(model, tmp_path / "file" / "kv")) == written[1]
    with engine(model, tmp_path / "kv") as llm:
        shutil.rmtree(tmp_path / "kv")
        found = ask(llm)
    assert numbers(found) == written[1]


def test_a_process_killed_in_the_middle_of_a_file_leaves_no_part_of_it(
    model: Path, written: tuple[Path, Any], tmp_path: Path
) -> None:
    """Its draft is no file that anybody reads, and is deleted when it is old."""
    shutil.copytree(written[0], tmp_path / "kv")
    path = stored_files(tmp_path / "kv")[0]
    content = path.read_bytes()[files.HEADER.size :]
    path.unlink()
    if (child := os.fork()) == 0:
        os.replace = lambda *_: os._exit(7)  # type: ignore[assignment]
        files.write(path, memoryview(content))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    (draft,) = path.parent.glob(f"*{files.DRAFT}")
    for stored in (False, True):
        found = run(model, tmp_path / "kv")
        assert numbers(found) == written[1] and (found.metrics.cached_tokens_disk == 768) == stored
    assert draft.exists()
    old = time.time() - 2 * ABANDONED_SECONDS
    os.utime(draft, (old, old))
    assert Space(tmp_path / "kv", None, 1).make_room(1) and not draft.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("what", "rounds"), [("kills", 10), ("mutations", 25)])
def test_random_trouble(model: Path, tmp_path: Path, what: str, rounds: int) -> None:
    """NANOVLLM_KV_DISK_ROUNDS: more of them. The script says what it does."""
    rounds = int(os.environ.get("NANOVLLM_KV_DISK_ROUNDS", rounds))
    script = Path(__file__).parent / "kv_disk_trouble.py"
    command = [sys.executable, str(script), what, str(model), str(tmp_path / "trouble"), str(rounds), "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "all answers right" in done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize("num_writers", [1, 3])
def test_space_is_bounded_by_deleting_what_was_used_least_recently(tmp_path: Path, num_writers: int) -> None:
    """Writers are the ranks of an engine, which take turns here."""
    limit = 20_000
    spaces = [Space(tmp_path, limit, num_writers) for _ in range(num_writers)]
    paths = [tmp_path / "model" / f"{number}{files.SUFFIX}" for number in range(60)]
    for number, path in enumerate(paths):
        assert spaces[number % num_writers].make_room(900)
        files.write(path, memoryview(bytes(900 - files.HEADER.size)))
        os.utime(path, (number, number))  # times of files may be coarse
        assert sum(path.stat().st_size for path in stored_files(tmp_path)) <= limit
        if paths[0].exists():
            os.utime(paths[0], (number + 1, number + 1))  # it is used
    kept = [number for number, path in enumerate(paths) if path.exists()]
    assert kept == [0, *range(61 - len(kept), 60)] and len(kept) >= 16
    assert not spaces[0].make_room(limit + 1)


def test_the_command_lists_verifies_and_removes(
    written: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The older format too, which nobody reads."""
    kv = tmp_path / "kv"
    shutil.copytree(written[0], kv)
    older = kv / ("0" * 64)
    older.mkdir()
    (older / "segment.kv").write_bytes(bytes(100))
    (kv / "mine").mkdir()
    assert main(["cache", "ls", str(kv)]) == 0
    listed = capsys.readouterr().out
    assert ": 768 tokens" in listed and "an older format: 0 tokens, 100 bytes" in listed
    assert main(["cache", "verify", str(kv)]) == 0
    path = stored_files(kv)[-1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert main(["cache", "verify", str(kv)]) == 1 and "damaged" in capsys.readouterr().out
    assert main(["cache", "rm", str(kv)]) == 0 and [path.name for path in kv.iterdir()] == ["mine"]
    assert main(["cache", "ls", str(tmp_path / "nowhere")]) == 2


def test_without_threads_of_its_own_work_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives no more threads."""
    monkeypatch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no more")))
    threads = DiskThreads("kv-disk-look", 1)
    done: list[int] = []
    threads.submit(lambda: done.append(1))
    threads.end()
    assert done == [1] and threads.join(0.0)
