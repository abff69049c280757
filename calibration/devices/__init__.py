"""`windve check --devices`: what this machine's device computes, how fast, and whether it is right."""
