"""Small wheels for pip to find, in the place of those of an index."""

from __future__ import annotations

import zipfile
from pathlib import Path


def write_wheel(directory: Path, requirement: str, path: str, content: bytes) -> Path:
    """Write the package of `requirement`, which names an exact version, with one file."""
    name, version = requirement.replace("-", "_").split("==")
    info = f"{name}-{version}.dist-info"
    target = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as wheel:
        wheel.writestr(path, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return target
