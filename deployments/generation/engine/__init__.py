"""What computes steps: a causal language model and its cache of keys and values, or an emulated device."""
