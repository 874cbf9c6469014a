"""Rows that begin with the same text go to the same replica, unless others would idle."""

from __future__ import annotations

from random import Random

import pytest

from nanovllm.apps.batch.router import Router, WaitingRow, prefix_hashes
from nanovllm.apps.batch.rows import Row, RowRequest


def waiting(index: int, prompt: str) -> WaitingRow:
    request = RowRequest(index, prompt=prompt)
    row = Row(index, f"line {index}", {}, {})
    return WaitingRow(row, request, prefix_hashes(request.prefix_parts()))


def document(name: str) -> str:
    return "".join(Random(name).choices("abcdefgh ", k=2000))


def router(*prompts: str) -> Router:
    made = Router()
    for index, prompt in enumerate(prompts):
        made.add(waiting(index, prompt))
    return made


def taken(from_router: Router, replica: int, is_idle: bool = False) -> int | None:
    found = from_router.take(replica, is_idle)
    return None if found is None else found.row.index


@pytest.mark.parametrize("cut", [1, 7, 255, 256, 257, 1000])
def test_hashes_do_not_depend_on_how_the_text_is_cut(cut: int) -> None:
    text = document("a").encode()
    parts = [text[i : i + cut] for i in range(0, len(text), cut)]
    assert prefix_hashes(parts) == prefix_hashes([text])
    assert len(prefix_hashes([text])) == 3  # 256, 512 and 1,024 bytes
    assert prefix_hashes([text[:255]]) == ()


def test_a_replica_stays_with_its_document() -> None:
    rows = router(*(document(name) + f" {i}" for i, name in enumerate("abab" * 3)))
    assert [taken(rows, 0), taken(rows, 1)] == [0, 1]
    assert [taken(rows, 0) for _ in range(5)] == [2, 4, 6, 8, 10]
    assert taken(rows, 0) is None  # the others are of replica 1's document
    assert [taken(rows, 1) for _ in range(3)] == [3, 5, 7]
    assert taken(rows, 0, is_idle=True) == 9  # rather than nothing
    assert taken(rows, 1) == 11
