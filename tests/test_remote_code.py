"""No model directory runs code: what would need it is refused, and nothing else reads standard input."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import edit_config, refusal
from cli_helpers import GREEDY, SMALL_CACHE, make_model

from nanovllm import LLM
from nanovllm.text.tokenizer import load_tokenizer

CODE = "from pathlib import Path\nPath({marker!r}).write_text('ran')\n{names}"
AUTO_MAP = {"AutoTokenizer": ["evil.Evil", None], "AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(make_model(tmp_path / "model"))


def add_code(model: Path, *names: str) -> Path:
    """Write evil.py with classes of these names; the file that it makes when it is imported."""
    marker = model.parent / "marker"
    classes = "".join(f"class {name}:\n    pass\n" for name in names)
    (model / "evil.py").write_text(CODE.format(marker=str(marker), names=classes))
    return marker


def run_cli(model: Path, *options: str, stdin: bytes) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "nanovllm", "generate", "--model", str(model), *SMALL_CACHE, *GREEDY, *options]
    environment = os.environ | {"HF_HOME": str(model.parent / "cache")}
    return subprocess.run(command, input=stdin, capture_output=True, env=environment, timeout=300)


@pytest.mark.slow
def test_lines_of_standard_input_are_prompts_and_nothing_else(model: Path) -> None:
    """The directory names code everywhere, and needs none of it: its own network and tokenizer are known."""
    marker = add_code(model, "Evil")
    for file in ("config.json", "tokenizer_config.json", "generation_config.json"):
        edit_config(model, file, auto_map=AUTO_MAP)
    (model / "custom_generate").mkdir()
    (model / "custom_generate/generate.py").write_text((model / "evil.py").read_text())
    run = run_cli(model, "--lines", "-", "--json", stdin=b"y\nno\n")
    assert run.returncode == 0, run.stderr.decode()
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert [result["num_prompt_tokens"] for result in results] == [1, 2], "a token for each letter"
    assert not marker.exists()


def test_code_by_any_name_is_refused(model: Path) -> None:
    marker = add_code(model, "Evil")
    for reference in ("evil.Evil", "someone/repo--evil.Evil", "../evil.Evil", 5):
        auto_map = {"AutoTokenizer": [reference, reference]}
        edit_config(model, "tokenizer_config.json", tokenizer_class="EvilTokenizer", auto_map=auto_map)
        message = refusal(lambda: load_tokenizer(model))
        assert str(model) in message and "\n" not in message
    assert not marker.exists()


def test_nothing_is_fetched_for_a_tokenizer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    edit_config(model, "tokenizer_config.json", name_or_path="someone/repo", tokenizer_file="https://example.org/x")
    tokenizer = load_tokenizer(model, "qwen3")
    assert tokenizer is not None and tokenizer.decode(tokenizer.encode("known")) == "known"


def test_code_that_is_asked_for_is_not_run_either(model: Path) -> None:
    marker = add_code(model, "Evil", "EvilForCausalLM")
    edit_config(model, "tokenizer_config.json", tokenizer_class="EvilTokenizer", auto_map=AUTO_MAP)
    assert "needs code of its own" in refusal(lambda: LLM(model, trust_remote_code=True))
    edit_config(model, architectures=["EvilForCausalLM"], model_type="evil", auto_map=AUTO_MAP)
    for trusted in (False, True):
        message = refusal(lambda trusted=trusted: LLM(model, trust_remote_code=trusted))
        assert "EvilForCausalLM" in message and "Qwen3ForCausalLM" in message
    assert not marker.exists()
