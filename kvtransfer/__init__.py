"""KV memory as bytes: what it looks like, who owns it, how it moves. Knows no model."""
