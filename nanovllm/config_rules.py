"""What single engine arguments must be: paths that are looked at, sizes, and the sentences about wrong values."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nanovllm.rules import Rule, share, size

MOST_GIB = 2**30  # more than any machine has
MOST_SECONDS = 10**9  # such as fit a timedelta
DIR_SECONDS = 5.0  # that a file system has to say what a path is

MODEL = "must be a directory in Hugging Face format or a GGUF file: give the path of a local one"
FROM_MEMORY = " or -1 to size it from memory"
GIB = 2**30
# Sizes, which may be text with a unit such as "7M", and the bytes of a number without one.
SIZES: Mapping[str, int] = MappingProxyType(
    {
        "kv_cache_memory_bytes": 1,
        "weights_memory_bytes": 1,
        "host_weights_bytes": 1,
        "kv_offloading_size": GIB,
        "swap_space": GIB,
        "kv_cache_dir_space": GIB,
    }
)
GIB_OR_SIZE = f'must be None, a number of GiB above 0 and at most {MOST_GIB:,}, or a size such as "20G"'
GIB_OR_NONE = f'must be None, a number of GiB from 0 to {MOST_GIB:,}, or a size such as "4G"'
KV_BYTES = (
    'must be None, a whole number of bytes of at least 1, a size such as "20G" or "7M", or a share such as "10%" of '
    f'the KV cache of a sequence of max_model_len tokens, or "10% of 32K"; at most {MOST_GIB:,}G'
)
WEIGHT_BYTES = (
    'must be None, a whole number of bytes of at least 1, a size such as "20G", or a share of the weights, such as '
    f'"25%"; at most {MOST_GIB:,}G'
)
HOST_WEIGHT_BYTES = (
    'must be None, a whole number of bytes of at least 1, a size such as "40G", or a share of the weights that stream, '
    f'such as "50%"; at most {MOST_GIB:,}G'
)
GENERATION = 'must be "auto", "vllm" (no recommendations) or a directory with a generation_config.json'


def is_weights_size(value: Any) -> bool:
    """Whether it is None, a size, or a share that names no tokens."""
    asked = share(value)
    return (
        size(WEIGHT_BYTES, 1, MOST_GIB * GIB).holds(value)
        if asked is None
        else asked.tokens is None and asked.part <= 1
    )


def is_dir(path: object) -> bool:
    """Whether it is the path of a directory."""
    try:
        return isinstance(path, str | Path) and Path(path).is_dir()
    except (OSError, ValueError):  # such as a name that is too long
        return False


def is_fields(value: object) -> bool:
    """Whether it is a mapping whose keys are text."""
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def is_generation_config(value: Any) -> bool:
    """Whether it says where recommended sampling parameters come from."""
    return value in ("auto", "vllm") or (is_dir(value) and (Path(value) / "generation_config.json").is_file())


def is_names(value: object) -> bool:
    """Whether it is a name, a list of names, or None."""
    listed = isinstance(value, Sequence) and len(value) > 0 and all(isinstance(name, str) for name in value)
    return value is None or listed


def can_be_file(path: Any) -> bool:
    """Whether it is the path of a file, or of none in a directory that exists."""
    try:
        return Path(path).parent.is_dir() and not stat.S_ISDIR(os.stat(Path(path)).st_mode)
    except FileNotFoundError:
        return True
    except (OSError, ValueError, TypeError):
        return False


def can_be_dir(path: object) -> bool:
    """Whether it is None, the path of a directory, or of nothing.

    True also if the file system does not answer: who uses the directory notices that, and can do without.
    """
    answers: list[bool] = []

    def look() -> None:
        try:
            answers.append(isinstance(path, str | Path) and (Path(path).is_dir() or not Path(path).exists()))
        except (OSError, ValueError):
            answers.append(False)

    if path is None or path == "":  # "" would be the working directory
        return path is None
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(DIR_SECONDS)
    return answers[0] if answers else True


FIELDS = Rule(is_fields, "must be a dict of fields and their values")
