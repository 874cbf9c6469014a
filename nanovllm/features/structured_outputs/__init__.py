"""Structured outputs: they match a JSON schema, a regular expression, choices or a grammar.

The library is llguidance, which the extra `structured` installs. Unlike xgrammar it needs no torch, has limits of its
own for compiling and for each mask, and compiles a schema of five properties in 1.3 ms instead of 430 (SmolLM2's 49,152
tokens, one thread). A mask takes 10 to 600 us, about ten times xgrammar's, but is made while the model computes.
"""

from nanovllm.features.structured_outputs.grammars import LLGuidanceCompiler

__all__ = ["LLGuidanceCompiler"]
