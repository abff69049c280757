"""Embedding models, rerankers and classifiers as clients see them: HTTP and gRPC."""
