"""What all gRPC services share."""
