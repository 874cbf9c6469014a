"""The committed type stubs of the extensions are those that `python -m tools.stubs` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.stubs import ROOT, write_stubs


@pytest.mark.slow
def test_the_stubs_are_those_of_the_built_extensions(tmp_path: Path) -> None:
    pytest.importorskip("pybind11_stubgen")
    for stub in write_stubs(tmp_path):
        assert stub.read_text() == (ROOT / stub.relative_to(tmp_path)).read_text(), "run `python -m tools.stubs`"
