"""Reads the Serve config, checks it, and turns it into deployments."""
