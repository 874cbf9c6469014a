"""Page-locked memory: what is mapped and locked, for how long, and that a failure leaves nothing behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.comm import _sgdma, memcpy_2d_async
from nanovllm.device import memory, pinned
from nanovllm.device.pinned import PageLock, empty_pinned
from nanovllm.errors import ConfigError

PAGE = 4096


class Ledger:
    """Locks nothing, but keeps what is locked, and can fail at the n-th piece."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.locked: dict[int, int] = {}
        self.asked: list[int] = []
        self._fails_at = fails_at

    def lock(self, start: int, size: int) -> None:
        self.asked.append(start)
        if len(self.asked) - 1 == self._fails_at:
            raise RuntimeError("cudaHostRegister of 5 bytes failed: out of memory.")
        assert start % PAGE == 0 and start not in self.locked
        self.locked[start] = size

    def unlock(self, start: int) -> None:
        del self.locked[start]


def is_mapped(address: int) -> bool:
    spans = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) ", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


def test_memory_is_of_the_exact_size_and_holds_what_is_written() -> None:
    ledger = Ledger()
    tensor = empty_pinned("host blocks", (3, 5, 7), torch.float32, ledger)
    assert tensor.shape == (3, 5, 7) and tensor.dtype == torch.float32
    assert tensor.untyped_storage().nbytes() == 3 * 5 * 7 * 4
    assert ledger.locked == {tensor.data_ptr(): 3 * 5 * 7 * 4}
    assert bool((tensor == 0).all())
    assert empty_pinned("host blocks", (0, 3, 4), torch.float32, ledger).shape == (0, 3, 4) and len(ledger.asked) == 1


def test_the_last_view_unlocks_and_unmaps() -> None:
    ledger = Ledger()
    tensor = empty_pinned("host blocks", (4, 64, 1024), torch.bfloat16, ledger, max_piece=3 * PAGE)
    address = tensor.data_ptr()
    view = tensor[3, 1:].view(torch.uint8)
    del tensor
    assert ledger.locked and is_mapped(address)
    view.fill_(7)
    del view
    assert not ledger.locked and not is_mapped(address)


@settings(max_examples=60)
@given(
    blocks=st.integers(1, 40),
    block_bytes=st.sampled_from([32, 96, 1024, 4096, 6144, 12288]),
    pages=st.integers(1, 9),
)
def test_pieces_cover_the_memory_and_no_block_lies_across_two(blocks: int, block_bytes: int, pages: int) -> None:
    ledger = Ledger()
    tensor = empty_pinned("host blocks", (blocks, block_bytes), torch.uint8, ledger, max_piece=pages * PAGE)
    ends = {start + size for start, size in ledger.locked.items()}
    starts = set(ledger.locked)
    assert min(starts) == tensor.data_ptr() and max(ends) == tensor.data_ptr() + tensor.nbytes
    assert starts - {min(starts)} == ends - {max(ends)}
    assert all((start - tensor.data_ptr()) % block_bytes == 0 for start in starts)
    least = -(-PAGE // block_bytes) * block_bytes * PAGE  # a common multiple of block and page, whatever the piece
    assert all(size <= max(pages * PAGE, least) for size in ledger.locked.values())


@pytest.mark.parametrize("piece", [0, 1, 3])
def test_a_failure_at_any_piece_is_one_sentence_and_leaves_nothing(piece: int) -> None:
    ledger = Ledger(fails_at=piece)
    with pytest.raises(ConfigError) as caught:
        empty_pinned("host blocks", (4, 1 << 24), torch.uint8, ledger, max_piece=1 << 24)
    assert str(caught.value) == (
        "host blocks: 0.06 GiB of page-locked host memory cannot be had: page-locking failed (cudaHostRegister of 5 "
        "bytes failed: out of memory); lower num_cpu_blocks"
    )
    assert len(ledger.asked) == piece + 1 and not ledger.locked
    assert not any(is_mapped(start) for start in ledger.asked)


class Machine:
    """Says how much memory it has and leaves: what is touched counts, and it may grow when it is used up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, grows_to: int = 0, when_left: int = 0) -> None:
        self.total = free
        self.used = 0
        self._grows_to = grows_to
        self._when_left = when_left
        touch = _sgdma.touch_pages
        monkeypatch.setattr(memory, "container_free_bytes", lambda: None)
        monkeypatch.setattr(memory, "total_bytes", lambda: self.total)
        monkeypatch.setattr(memory, "available_bytes", lambda: max(0, self.total - self.used))
        monkeypatch.setattr(_sgdma, "touch_pages", lambda start, size, n: (touch(start, size, n), self._use(size)))
        monkeypatch.setattr(pinned, "TOUCHED_STEP", 4 * PAGE)
        monkeypatch.setattr(pinned, "GROWTH_SECONDS", 0.01)

    def _use(self, size: int) -> None:
        self.used += size
        while self.used + self._when_left > self.total < self._grows_to:
            self.total += 16 * PAGE


@pytest.mark.parametrize("when_left", [0, 2 * PAGE])
def test_a_machine_that_grows_when_it_is_used_gives_all(when_left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its MemTotal is at first far below what it can have, so that is no reason to refuse."""
    machine = Machine(monkeypatch, 20 * PAGE, grows_to=500 * PAGE, when_left=when_left)
    ledger = Ledger()
    tensor = empty_pinned("host blocks", (400, PAGE), torch.uint8, ledger)
    assert machine.used == tensor.nbytes and sum(ledger.locked.values()) == tensor.nbytes
    assert bool((tensor == 0).all())
    del tensor
    with pytest.raises(ConfigError, match=r"GiB of it were taken, and no more are free"):
        empty_pinned("host blocks", (400, PAGE), torch.uint8, ledger)
    assert machine.used < 500 * PAGE + 5 * PAGE and not ledger.locked


def test_what_a_machine_does_not_have_is_refused_when_it_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 100 * PAGE)
    ledger = Ledger()
    with pytest.raises(ConfigError, match=r"had: 0\.00 GiB of it were taken, and no more are free; lower num_cpu"):
        empty_pinned("host blocks", (1000, PAGE), torch.uint8, ledger)
    assert machine.used <= 104 * PAGE and not ledger.asked, "a small step at a time near the end"
    machine.used = 0
    assert empty_pinned("host blocks", (90, PAGE), torch.uint8, ledger).nbytes == 90 * PAGE


def test_more_than_a_container_leaves_is_refused_before_anything_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "container_free_bytes", lambda: 1 << 20)
    ledger = Ledger()
    with pytest.raises(ConfigError, match=r"the container leaves 0\.00 GiB; lower num_cpu_blocks"):
        empty_pinned("host blocks", (2, 1 << 20), torch.uint8, ledger)
    assert not ledger.asked
    assert empty_pinned("host blocks", (1, 1 << 20), torch.uint8, ledger).nbytes == 1 << 20


# ---- on a GPU


@pytest.mark.cuda
def test_cuda_takes_the_memory_for_pinned_and_copies_through_it() -> None:
    device = torch.zeros(6, 1 << 20, dtype=torch.uint8, device="cuda")  # before it torch takes no memory for pinned
    stream = torch.cuda.Stream()
    host = empty_pinned("host blocks", (6, 1 << 20), torch.uint8, PageLock(), max_piece=2 << 20)
    assert host.is_pinned() and host[5].is_pinned()
    assert _sgdma.memory_of(host.data_ptr())[0] == "pinned"
    host.copy_(torch.randint(0, 256, host.shape, dtype=torch.uint8))
    torch.cuda.synchronize()
    for block in range(6):  # of which no two lie in one piece
        memcpy_2d_async(device[block], host[block], 4096, 4096, 4096, 256, "h2d", stream)
    stream.synchronize()
    assert torch.equal(device.cpu(), host)


@pytest.mark.cuda
def test_after_the_memory_is_gone_it_is_not_pinned_any_more_and_cuda_is_well() -> None:
    host = empty_pinned("host blocks", (2, 1 << 20), torch.uint8, PageLock())
    address = host.data_ptr()
    del host
    assert _sgdma.memory_of(address) == _sgdma.memory_of(torch.zeros(8).data_ptr()) == ("pageable", -1)
    assert float(torch.ones(4, device="cuda").sum()) == 4.0
