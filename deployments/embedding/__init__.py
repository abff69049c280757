"""Embeddings, ranks and classes: the way of a query from the Router to a device and back."""
