"""Adapters by name: in the server's requests, and with `nanovllm generate`, `chat` and `serve`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import SMALL_CACHE, exit_status, generate, json_lines, make_model, set_stdin, write_jsonl
from lora_helpers import make_adapter
from server_helpers import CACHE, NAME, ask, events, nothing_left
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.apps.server.async_llm import AsyncLLM
from nanovllm.lora_request import LoRARequest

GREEDY_PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LORA = {"enable_lora": True, "max_loras": 2}


class Setup:
    """A model, two adapters, and the text that each gives to a prompt."""

    def __init__(self, folder: Path) -> None:
        self.model = make_model(folder / "model")
        reference = AutoModelForCausalLM.from_pretrained(self.model)
        self.adapters = [
            make_adapter(folder / name, reference, number) for number, name in enumerate(("sql", "law"), 1)
        ]
        with LLM(self.model, **CACHE, **LORA) as llm:
            self.texts = {
                adapter and adapter.lora_name: llm.generate(
                    "hello", GREEDY_PARAMS, use_tqdm=False, lora_request=adapter
                )[0]
                .outputs[0]
                .text
                for adapter in (None, *self.adapters)
            }
        assert len(set(self.texts.values())) == 3

    def module(self, index: int) -> str:
        return f"{self.adapters[index].lora_name}={self.adapters[index].lora_path}"


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("lora"))


# ---- the server


@pytest.fixture(scope="module")
def engine(setup: Setup) -> Iterator[AsyncLLM]:
    with AsyncLLM(setup.model, **CACHE, **LORA) as engine:
        yield engine
        assert nothing_left(engine)


def answer(engine: AsyncLLM, setup: Setup, model: str | None, **body: Any) -> Any:
    fields = {"prompt": "hello", "temperature": 0, "max_tokens": 6, "ignore_eos": True, **body}
    if model is not None:
        fields["model"] = model
    response = ask(engine, "/v1/completions", fields, lora_requests=tuple(setup.adapters))
    assert response.status_code == 200, response.text
    return events(response.text) if body.get("stream") else response.json()


def test_requests_name_an_adapter_as_their_model(engine: AsyncLLM, setup: Setup) -> None:
    for asked, name, adapter in (
        (None, NAME, None),
        ("alias", NAME, None),
        ("sql", "sql", "sql"),
        ("law", "law", "law"),
    ):
        found = answer(engine, setup, asked)
        assert (found["model"], found["choices"][0]["text"]) == (name, setup.texts[adapter])
    *chunks, done = answer(engine, setup, "law", stream=True)
    assert done == "[DONE]" and {chunk["model"] for chunk in chunks} == {"law"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == setup.texts["law"]


def test_the_list_of_models_has_the_adapters(engine: AsyncLLM, setup: Setup) -> None:
    adapters = (setup.adapters[0], LoRARequest("law", 2, setup.adapters[1].lora_path, "Base/Model"))
    listed = ask(engine, "/v1/models", lora_requests=adapters).json()["data"]
    found = [(model["id"], model["root"], model["parent"]) for model in listed]
    assert found == [
        (NAME, NAME, None),
        ("alias", NAME, None),
        ("sql", adapters[0].lora_path, NAME),
        ("law", adapters[1].lora_path, "Base/Model"),
    ]
    assert ask(engine, "/v1/models/law", lora_requests=adapters).json()["parent"] == "Base/Model"
    response = ask(engine, "/v1/completions", {"prompt": "a", "model": "medicine"}, lora_requests=adapters)
    assert response.status_code == 404 and "'medicine' is not served" in response.json()["error"]["message"]


# ---- the command line


def flags(setup: Setup, *indices: int) -> list[str]:
    return [
        "--enable-lora",
        "--max-loras",
        "2",
        *(word for i in indices for word in ("--lora-modules", setup.module(i))),
    ]


def test_lines_of_a_file_name_their_own(setup: Setup, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a name it is that of --lora; null is the model alone; an unknown name fails its line alone."""
    lines = [{"prompt": "hello", "lora": name} for name in ("law", None, "sq", 5)] + [{"prompt": "hello"}]
    jsonl = write_jsonl(tmp_path / "p.jsonl", *lines)
    assert generate(setup.model, "--jsonl", jsonl, "--json", *flags(setup, 0, 1), "--lora", "sql") == 1
    results = json_lines(capsys.readouterr().out)
    texts = [result["outputs"][0]["text"] if result.get("outputs") else result["error"] for result in results]
    assert texts[:2] == [setup.texts["law"], setup.texts[None]] and texts[4] == setup.texts["sql"]
    assert "unknown lora 'sq': did you mean 'sql'?" in texts[2] and "unknown lora '5'" in texts[3]


def test_flags_that_are_refused(
    setup: Setup, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, says in (
        ("generate hello --lora-modules a", "'a' is neither name=path nor"),
        ('generate hello --lora-modules {"name":"a"}', "is neither name=path nor"),
        ("generate hello --lora-modules a=b", "--lora-modules needs --enable-lora"),
        ("generate hello --lora a", "--lora 'a' is not one of --lora-modules: none is named"),
        ("chat --enable-lora --lora-modules a=b --lora c", "--lora 'c' is not one of --lora-modules: a"),
        ("generate hello --enable-lora --lora-modules a=b --lora-modules a=c", "names 'a', a name in use"),
        ("chat --enable-lora --lora-modules a=b --lora-modules c=d", "say with --lora NAME which one"),
        ("generate hello --max-loras 2", "max_loras=2: needs enable_lora=True"),
        ("serve --enable-lora --served-model-name a --lora-modules a=b", "names 'a', a name in use"),
        ("serve --enable-lora --port 0 --lora-modules a=/none b=c", "--lora-modules a=/none: the adapter"),
    ):
        set_stdin(monkeypatch, b"hello\n")
        command, *options = words.split()
        assert exit_status([command, "--model", setup.model, *SMALL_CACHE, *options]) == 2
        assert says in capsys.readouterr().err
