"""How many blocks and how many bytes: every question about sizes of memory."""
