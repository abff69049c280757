"""Reads a model's own files: its card, weights and tokenizer; and handles pairs of texts and sparse vectors."""
