"""KV blocks on disk: a prefix that was computed once is found again by the next process. docs/kv-on-disk.md."""

from nanovllm.features.kv_disk.inspect import Kept, kept_in, remove, verify

__all__ = ["Kept", "kept_in", "remove", "verify"]
