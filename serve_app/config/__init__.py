"""The Serve config: read, checked, and turned into deployments."""
