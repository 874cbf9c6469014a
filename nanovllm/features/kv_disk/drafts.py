"""Small files that are replaced at once: whoever reads one finds the old or the new content, also after a kill."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ABANDONED_SECONDS = 3600.0  # age of a draft that no process is writing any more


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write the file, and delete drafts of it that killed processes have left. Raises OSError."""
    for abandoned in path.parent.glob(f"{path.name}.*"):
        with suppress(OSError):  # a read-only file system, or another process was faster
            if time.time() - abandoned.stat().st_mtime > ABANDONED_SECONDS:
                abandoned.unlink()
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w") as file:
            json.dump(content, file)
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):  # a read-only file system refuses this too
            draft.unlink(missing_ok=True)
        raise
