"""The Dockerfiles, as far as they can be checked without Docker."""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from pathlib import Path

import pytest

from nanovllm.cli import serve

ROOT = Path(__file__).parent.parent
FILES = ("Dockerfile", "Dockerfile.cuda")


@pytest.mark.parametrize("name", FILES)
def test_the_entry_point_is_a_command_with_its_flags(name: str) -> None:
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", (ROOT / name).read_text(), re.MULTILINE)
    program, *arguments = json.loads(entry)
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers(), "")
    args = parser.parse_args([*arguments, "--enable-cpu-offload", "--api-key", "secret"])
    assert (program, args.model, args.host, args.port) == ("nanovllm", "/model", "0.0.0.0", 8000)


@pytest.mark.parametrize("name", FILES)
def test_versions_and_extras_are_those_of_the_project(name: str) -> None:
    text = (ROOT / name).read_text()
    (torch,) = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.findall(r"^ARG TORCH=(\S+)$", text, re.MULTILINE) == [torch]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = re.findall(r"\.whl\)\[([\w,]+)\]", text)
    assert "server" in wanted.split(",") and set(wanted.split(",")) <= extras.keys()


@pytest.mark.parametrize("name", FILES)
def test_the_server_does_not_run_as_root(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    assert lines.index("USER nanovllm") < next(i for i, line in enumerate(lines) if line.startswith("ENTRYPOINT"))
