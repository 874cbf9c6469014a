"""Model names of the Hugging Face hub: the local snapshot of one, from the cache or downloaded.

Only config, tokenizer and safetensors files are downloaded: no code and no pickles.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from nanovllm.data.json_fields import read_json_object
from nanovllm.errors import ConfigError, ModelError, quoted, told

MODELOPT = "hf_quant_config.json"  # what ModelOpt says of its checkpoints, of some there alone
CONFIG_FILES = ("config.json", "generation_config.json", MODELOPT)
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
)
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
LEFT_OUT = ("*/*", "consolidated*")  # folders, and a second copy of the weights in another layout
INDEX = "model.safetensors.index.json"
Content = Literal["model", "config", "tokenizer"]  # config: a model without its weights
MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


def is_gguf(path: object) -> bool:
    """Whether the path is that of a GGUF file, by its ending."""
    return isinstance(path, str | Path) and Path(path).suffix.lower() == ".gguf" and os.path.isfile(path)


def find_directories(model: str, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """The engine arguments, with directories in the place of the names of model and tokenizer.

    Raises ConfigError as `find_directory` does.
    """
    arguments = dict(engine_args)
    where = {"download_dir": arguments.get("download_dir"), "token": arguments.get("hf_token")}
    content: Content = "config" if arguments.get("load_format") == "dummy" else "model"
    directory = find_directory("model", model, revision=arguments.get("revision"), content=content, **where)
    arguments["model"] = str(directory)
    if not _is_local(model) and arguments.get("served_model_name") is None:
        arguments["served_model_name"] = model
    revision = arguments.get("tokenizer_revision")
    tokenizer = arguments.get("tokenizer")
    if tokenizer is None and revision is not None:
        tokenizer = model
    if tokenizer is not None:
        path = find_directory("tokenizer", tokenizer, revision=revision, content="tokenizer", **where)
        arguments["tokenizer"] = str(path)
    return arguments


def find_directory(
    argument: Literal["model", "tokenizer"],
    name: str | Path,
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    token: str | None = None,
    content: Content = "model",
) -> Path:
    """The directory or GGUF file `name`; where there is none, the local snapshot of the hub's model of that name.

    A complete snapshot in the cache is used as it is, without a network; another one is downloaded. argument: the
    engine argument that gave the name, for messages. revision: a branch, tag or commit; "main" by default.
    download_dir: the cache directory; huggingface_hub's own by default. content: what the snapshot is needed for.
    Raises ConfigError, with the directories that were looked in.
    """
    if not isinstance(name, str | Path):
        what = "must be a directory, a GGUF file or the name of a model on the hub"
        raise ConfigError(f"{argument}={quoted(name)}: {what}")
    if _is_local(name):
        if revision is not None:
            what = "revision" if argument == "model" else "tokenizer_revision"
            kind = "a file" if is_gguf(name) else "a directory"
            where = f"{argument}={quoted(str(name))} is {kind}, which has no revisions"
            raise ConfigError(f"{what}={quoted(revision)}: {where}: leave {what} out")
        return Path(name)
    if MODEL_NAME.fullmatch(str(name)) is None or os.path.exists(name):
        raise ConfigError(
            f"{argument}={quoted(str(name))} is not a directory: give the path of a local checkpoint in Hugging Face "
            "format or of a GGUF file, or the name of a model on the hub, such as Qwen/Qwen3-0.6B"
        )
    # Slow to import, and not needed for directories.
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE if download_dir is None else download_dir)
    options = {"revision": revision, "cache_dir": cache, "token": token}
    with suppress(Exception):  # the library raises many types if the cache has no such snapshot
        return _snapshot(str(name), content, local_files_only=True, **options)
    try:
        return _snapshot(str(name), content, local_files_only=False, **options)
    except Exception as error:
        at = "" if revision is None else f" at revision {quoted(revision)}"
        raise ConfigError(
            f"{argument}={quoted(str(name))}: {Path(name).absolute()} is not a directory, {cache} holds no complete "
            f"snapshot of a model of that name{at}, and it cannot be downloaded ({told(error)}): give the path of a "
            "local directory, or download the model where the hub can be reached"
        ) from error


def _snapshot(name: str, content: Content, **options: Any) -> Path:
    """The complete snapshot of a model. options: of `snapshot_download`.

    Raises what that raises, and FileNotFoundError if files are missing.
    """
    from huggingface_hub import snapshot_download

    patterns = [*CONFIG_FILES, *TOKENIZER_FILES, *(WEIGHT_FILES if content == "model" else ())]
    snapshot = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=list(LEFT_OUT), **options))
    if not _is_complete(snapshot, content):
        raise FileNotFoundError(f"{snapshot} lacks files of the {content}")
    return snapshot


def _is_complete(snapshot: Path, content: Content) -> bool:
    """Whether a snapshot has what it is needed for; an interrupted download lacks some of it."""
    if content == "tokenizer":
        return any((snapshot / name).is_file() for name in TOKENIZER_FILES)
    if not (snapshot / "config.json").is_file():
        return False
    if content == "config" or (snapshot / "model.safetensors").is_file():
        return True
    try:
        shards = read_json_object(snapshot / INDEX).get("weight_map")
    except ModelError:
        return False
    return isinstance(shards, dict) and all((snapshot / str(name)).is_file() for name in shards.values())


def _is_local(path: str | Path) -> bool:
    return os.path.isdir(path) or is_gguf(path)
