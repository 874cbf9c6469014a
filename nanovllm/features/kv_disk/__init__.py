"""KV blocks on disk: a prefix that was computed once is found again by the next process. docs/kv-on-disk.md."""

from nanovllm.features.kv_disk.files import Kept, kept_in, remove

__all__ = ["Kept", "kept_in", "remove"]
