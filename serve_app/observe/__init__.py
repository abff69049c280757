"""The access log and traces."""
