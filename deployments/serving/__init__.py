"""The request path that embeddings and generation share: links, channels, replica sets, metrics."""
