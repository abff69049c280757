"""The latency of a burst by its size (Eq. 12), the cost of a query by its length, which burst is next. Pure."""
