"""Reads tool calls from what models write, in the formats of their chat templates. Server and batch share it."""
