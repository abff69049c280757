"""Hybrid decoding: the host holds a part of the cache, and computes the attention to it. Pure."""
