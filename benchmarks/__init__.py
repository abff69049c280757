"""Measurements that a person starts: each a paired comparison in one run, with raw samples, a table and a picture."""
