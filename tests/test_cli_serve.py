"""`nanovllm serve`: its flags, and what it refuses before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_helpers import exit_status

from nanovllm.apps.cli import serve
from nanovllm.apps.cli.main import main
from nanovllm.apps.server import async_llm, run
from nanovllm.apps.server.settings import ServerSettings


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ServerSettings]:
    """Instead of loading a model and serving it, the settings are noted."""
    found: list[ServerSettings] = []

    class Engine:
        def __init__(self, model: str, **arguments: Any) -> None:
            self.llm = type("LLM", (), {"max_model_len": 4096})()

    monkeypatch.setattr(async_llm, "AsyncLLM", Engine)
    monkeypatch.setattr(run, "serve", lambda engine, settings, opened: found.append(settings) or 0)
    return found


def test_settings_come_from_flags_files_and_the_environment(
    loaded: list[ServerSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text("one\n\n two \n")
    monkeypatch.setenv(serve.KEY_VARIABLE, "three")
    flags = ["--api-key", "zero", "--api-key-file", str(tmp_path / "keys"), "--allow-origin", "https://a", "--no-ui"]
    flags += ["--max-queue", "7", "--shutdown-timeout", "1.5", "--tool-call-parser", "hermes"]
    assert main(["serve", "--model", str(tmp_path), "--port", "0", *flags]) == 0
    (settings,) = loaded
    assert set(settings.api_keys) == {"zero", "one", "two", "three"} and settings.allowed_origins == ("https://a",)
    assert (settings.max_queue, settings.shutdown_timeout, settings.ui) == (7, 1.5, False)
    assert settings.served_model_names == (tmp_path.name, str(tmp_path)) and settings.host == "127.0.0.1"
    told = capsys.readouterr().err
    assert f"{tmp_path.name} is served at http://127.0.0.1:" in told and "4,096 tokens" in told


def test_refusals(
    loaded: list[ServerSettings], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("\n")
    for flags, words in (
        (["--api-key-file", "nowhere"], "'nowhere' cannot be read"),
        (["--api-key-file", "empty"], "holds no key"),
        (["--api-key", " k"], "spaces around it"),
        (["--port", "70000"], "port=70000"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["--tool-call-parser", "x"], "tool_call_parser='x'"),
        (["--default-chat-template-kwargs", '{"tools": []}'], "default_chat_template_kwargs='tools'"),
        (["--chat-template", "nowhere"], "--chat-template"),
        (["--max-model-len", "0"], "max_model_len=0"),
        (["--max-modl-len", "5"], "did you mean '--max-model-len'"),
    ):
        assert exit_status(["serve", "--model", str(tmp_path), "--port", "0", *flags]) == 2
        assert words in capsys.readouterr().err and not loaded
