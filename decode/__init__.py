"""The decode pool: KV in, tokens out. The only sampler."""
