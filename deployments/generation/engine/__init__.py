"""Computes steps: a causal language model with its cache of keys and values, or an emulated device."""
