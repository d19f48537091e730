"""Transports that move KV bytes between arenas; they know bytes and keys, no model and no message."""
