"""Which replica a query goes to. Pure."""
