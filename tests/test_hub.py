"""Models that are named as on the hub: found in the cache of huggingface_hub without a network, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from checkpoints import make_checkpoint
from engines import greedy, token_ids
from tokenizer_files import write_byte_level

from nanovllm import LLM
from nanovllm.config import engine_config
from nanovllm.errors import ConfigError
from nanovllm.formats.hub import find_directory

NAME = "someone/tiny-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = {"kvcache_block_size": 16, "num_gpu_blocks": 40}


def add_to_cache(cache: Path, name: str = NAME, revision: str = "main", commit: str = COMMIT) -> Path:
    """The empty snapshot of a model in a cache, as huggingface_hub lays it out."""
    root = cache / f"models--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / revision).write_text(commit)
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """With one complete model."""
    snapshot = add_to_cache(tmp_path / "cache")
    make_checkpoint(snapshot, vocab=300)
    write_byte_level(snapshot)
    return tmp_path / "cache"


def message_of(name: str, **arguments: Any) -> str:
    with pytest.raises(ConfigError) as refusal:
        engine_config(name, arguments)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_a_model_of_the_cache_is_used_under_its_name(cache: Path) -> None:
    snapshot = cache / "models--someone--tiny-model" / "snapshots" / COMMIT
    with LLM(NAME, download_dir=str(cache), **SMALL) as llm, LLM(snapshot, **SMALL) as direct:
        assert Path(llm.config.model) == snapshot and llm.config.model_name == NAME
        assert token_ids(llm, ["a text"], greedy(4)) == token_ids(direct, ["a text"], greedy(4))


def test_a_revision_and_a_tokenizer_of_another_model(cache: Path) -> None:
    old = add_to_cache(cache, revision="v1", commit="1" * 40)
    make_checkpoint(old, vocab=300, layers=1)
    tokenizer = add_to_cache(cache, "someone/tokenizer")
    write_byte_level(tokenizer)
    arguments = {"download_dir": str(cache), "revision": "v1", "tokenizer": "someone/tokenizer"}
    config = engine_config(NAME, arguments)
    assert (Path(config.model), Path(config.tokenizer or "")) == (old, tokenizer)
    config = engine_config(NAME, {"download_dir": str(cache), "tokenizer_revision": "main"})
    assert config.tokenizer == config.model


def test_offline_the_error_says_where_was_looked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cache)
    for name, arguments in (("someone/else", {}), (NAME, {"revision": "v2"})):
        message = message_of(name, download_dir=str(cache), **arguments)
        assert f"model={name!r}: {cache / name} is not a directory, {cache} holds no complete snapshot" in message
        assert "local directory" in message and (not arguments or "revision 'v2'" in message)


def test_every_shard_of_an_index_must_be_there(cache: Path) -> None:
    snapshot = add_to_cache(cache, "someone/sharded")
    make_checkpoint(snapshot, vocab=300, sharded=True)
    assert engine_config("someone/sharded", {"download_dir": str(cache)}).model == str(snapshot)
    sorted(snapshot.glob("model-*.safetensors"))[0].unlink()
    assert "holds no complete snapshot" in message_of("someone/sharded", download_dir=str(cache))
    config = engine_config("someone/sharded", {"download_dir": str(cache), "load_format": "dummy"})
    assert config.model == str(snapshot), "random weights need a config alone"


def test_only_safetensors_config_and_tokenizer_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    hub = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "tokenizer.json", "modeling_x.py"]
    hub += ["pytorch_model.bin", "original/consolidated.00.pth", "original/model.safetensors", "training_args.bin"]
    hub += ["consolidated.safetensors", "custom_generate/generate.py", "tokenizer.model", "README.md"]

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append(options)
        if options["local_files_only"]:
            raise FileNotFoundError("not in the cache")
        chosen = huggingface_hub.utils.filter_repo_objects(
            hub, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
        )
        for file in chosen:
            (tmp_path / file).write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert find_directory("model", NAME, revision="v1", token="secret") == tmp_path
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"config.json", "tokenizer.json", "tokenizer.model", *hub[1:3]}
    assert [(options["revision"], options["token"]) for options in asked] == [("v1", "secret")] * 2


@pytest.mark.parametrize("name", ["/no/such/model", "a/b/c", "../x/y", "-x/y", "x" * 5000])
def test_what_is_no_name_of_the_hub_is_not_looked_up(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*args: object, **options: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)
    monkeypatch.chdir(tmp_path)
    assert "is not a directory" in message_of(name)
    (tmp_path / "file").write_text("x")
    assert "model='file' is not a directory" in message_of("file")
