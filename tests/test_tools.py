"""The scripts about the code itself: what the walk counts, and the drawing of packages and imports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from nanovllm.kvcache.budget import DeviceSplit, split_device
from tools.drawing import draw
from tools.structure import PACKAGE
from tools.walk import CONFIG, Walk, fields_of, walk_decode_step

SOURCE = '''
class Block:
    def __init__(self):
        self.size = 2

    @property
    def end(self):
        """One statement."""
        return self.size

    @property
    def computed(self):
        size = self.size
        return size

    def __len__(self):
        return self.size

    def grow(self):
        return [self.end for _ in range(len(self))]
'''


def test_what_reads_like_a_field_is_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "block.py"
    path.write_text(SOURCE)
    lines = SOURCE.splitlines()
    assert {lines[line].strip() for line in fields_of(path)} == {"def end(self):", "return self.size"}


def test_a_walk_notes_functions_of_the_package_once() -> None:
    walk = Walk()
    sys.setprofile(walk)
    try:
        for _ in range(2):
            split_device(8, 2, 4096).group_slots(4096)
            DeviceSplit(4, 4)
    finally:
        sys.setprofile(None)
    ((path, names),) = walk.functions.items()
    assert path.name == "budget.py" and names == ["split_device", "DeviceSplit.group_slots"]


def test_the_way_of_a_decode_step_stays_short(tmp_path: Path) -> None:
    """Bounds, so that no change makes the way longer unseen."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    walk = walk_decode_step(tmp_path, cpu_attention=False)
    counted = {str(path.relative_to(PACKAGE)): names for path, names in walk.functions.items()}
    for of_tests in ("device/ordering.py", "device/wrapper.py"):  # the ordering check, which only tests use
        counted.pop(of_tests, None)
    assert {"llm.py", "kvcache/offload_engine.py"} <= counted.keys()
    assert "nanovllm.ops._cpu_attention.attend" in walk.kernels
    assert len(counted) <= 30 and sum(map(len, counted.values())) <= 115


def test_the_drawing_has_each_package_and_the_fewest_arrows(tmp_path: Path) -> None:
    package = tmp_path / "house"
    for name, text in {
        "errors.py": "class E(Exception): ...\n",
        "config.py": "from house.errors import E\n",
        "top.py": "import house.middle.stairs\nfrom house.config import E\n",
        "middle/__init__.py": "",
        "middle/stairs.py": "def climb():\n    from house.low import step\n",
        "low/__init__.py": "",
        "low/step.py": "if TYPE_CHECKING:\n    from house.top import E\nfrom house import errors\n",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    drawn = draw(package)
    arrows = {line.strip() for line in drawn.splitlines() if "-->" in line}
    assert arrows == {"top --> middle", "middle --> low", "low --> plain_data"}
    assert 'low["low<br/>2 files, 3 lines"]' in drawn and 'plain_data["plain data<br/>2 files, 2 lines"]' in drawn
