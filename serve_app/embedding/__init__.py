"""The HTTP and gRPC APIs of embedding models, rerankers and classifiers."""
