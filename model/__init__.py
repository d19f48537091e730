"""DeepSeek-V4, for either pool."""
