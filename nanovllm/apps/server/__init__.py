"""An OpenAI-compatible HTTP server, and the engine for asyncio that it uses. It needs the extra `nanovllm[server]`."""
