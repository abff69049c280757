"""What windve is compared with: a module for each server, run in an environment of its own (NAME.txt), without anything
of windve's.
"""
