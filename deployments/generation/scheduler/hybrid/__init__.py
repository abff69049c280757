"""Hybrid decoding: a host that holds a part of the cache and computes its attention. Pure."""
