"""How many rows are worked on at once, which bounds the memory of a step. No torch."""

from __future__ import annotations

# Rows per product of the network. On the CPU 256 to 4,096 are as fast, and temporaries grow with it.
CPU_CHUNK_ROWS = 1024
DEVICE_CHUNK_ROWS = 8192
LOGPROB_ROWS = 256  # rows whose log-probabilities are computed at once
# Logits per draw, which takes about twelve times their memory; on the CPU that should fit the cache.
CPU_PIECE = 2**18
DEVICE_PIECE = 2**23
