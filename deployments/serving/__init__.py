"""What embeddings and generation share on the way of a request: links, channels, replica sets, metrics."""
