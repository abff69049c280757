"""The access log and the traces."""
