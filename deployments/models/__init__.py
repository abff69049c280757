"""A model's own files: what they say, its tokenizer, pairs of texts, sparse vectors."""
