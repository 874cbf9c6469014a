"""What the sdist and the package contain."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import nanovllm

ROOT = Path(__file__).resolve().parent.parent
IGNORED = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "*.egg-info", "*.so", "__pycache__", ".*_cache", ".hyp*"
)


@pytest.fixture(scope="module")
def sdist_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The paths in an sdist that is made in a copy of the tree."""
    pytest.importorskip("setuptools")
    tree = tmp_path_factory.mktemp("sdist") / "tree"
    shutil.copytree(ROOT, tree, ignore=IGNORED)
    subprocess.run([sys.executable, "setup.py", "--quiet", "sdist"], cwd=tree, check=True, timeout=120)
    (archive,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        return {name.partition("/")[2] for name in tar.getnames()}


def test_an_sdist_has_all_that_a_build_and_the_tests_need(sdist_files: set[str]) -> None:
    wanted = [path for path in ROOT.glob("csrc/*") if path.suffix in (".cpp", ".cu", ".h")]
    endings = (".py", ".pyi", ".txt", ".typed", ".json", ".html")
    wanted += [path for path in ROOT.glob("nanovllm/**/*") if path.suffix in endings]
    wanted += [
        *ROOT.glob("tests/**/*.py"),
        *ROOT.glob("examples/*.*"),
        *ROOT.glob("benchmarks/**/*.py"),
        *ROOT.glob("tools/*.py"),
    ]
    names = {str(path.relative_to(ROOT)) for path in wanted}
    assert len(names) > 200
    names |= {"setup.py", "pyproject.toml", "Makefile", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"}
    assert sorted(names - sdist_files) == []


def test_nothing_that_was_built_is_in_the_sdist(sdist_files: set[str]) -> None:
    assert [name for name in sdist_files if name.endswith((".so", ".o", ".pyc"))] == []


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == nanovllm.__version__
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_folder_that_holds_the_clone_does_not_hide_an_editable_install(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    clone = tmp_path / "nanovllm"
    (clone / "nanovllm").mkdir(parents=True)
    (clone / "nanovllm" / "__init__.py").write_text("LLM = 'of the clone'\n")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    build = "from setuptools import build_meta; build_meta.build_editable('..')"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, timeout=120, stdout=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as installed:
        installed.extractall(tmp_path / "site")
    use = "import site; site.addsitedir('site'); from nanovllm import LLM; print(LLM)"
    command = [sys.executable, "-S", "-c", use]  # without the packages of this environment
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        command, cwd=tmp_path, env=environment, check=True, timeout=60, capture_output=True, text=True
    )
    assert found.stdout == "of the clone\n"
