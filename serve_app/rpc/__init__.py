"""Code that all gRPC services share."""
