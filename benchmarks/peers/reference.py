"""Reads texts as a JSON list from stdin, and writes their float32 vectors to stdout: the contestants' reference."""

import json
import os
import sys

from benchmarks.peers.model import Model

if __name__ == "__main__":
    os.environ["DTYPE"] = "float32"
    json.dump(Model().embed(json.load(sys.stdin)).tolist(), sys.stdout)
