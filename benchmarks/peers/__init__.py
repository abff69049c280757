"""What windve is compared with: one module for each server, run by `python -m benchmarks.peers.NAME PORT` in an environment
of its own (NAME.txt), without anything of windve's.
"""
