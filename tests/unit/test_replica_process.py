"""What a replica has loaded costs no collection anything."""

import subprocess
import sys

_CODE = """
import gc
from deployments.serve_adapter.replica_process import freeze_gc
gc.disable()
class Node: pass
loaded, garbage = [Node() for _ in range(1000)], Node()
garbage.itself = garbage
gone = __import__("weakref").ref(garbage)
del garbage
freeze_gc()
later = Node()
print(gone() is None, any(one is loaded for one in gc.get_objects()), any(one is later for one in gc.get_objects()))
"""


def test_what_is_loaded_is_looked_at_no_more_and_what_comes_later_is():
    found = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "False", "True"]
