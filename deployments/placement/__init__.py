"""Chooses the replica that a query goes to, and follows which replicas live. Runs in the Router."""
