"""A model's own files: what they say, its weights, its tokenizer, pairs of texts, sparse vectors."""
