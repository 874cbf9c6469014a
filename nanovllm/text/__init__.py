"""Text in and out: prompts, tokenizers, chat templates."""
