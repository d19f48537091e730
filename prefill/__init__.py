"""The prefill pool: prompts in, KV out. Never samples."""
