"""`cuda_graphs.Recorder` without a card: records torch's operations on the CPU, and repeats them on the same tensors.

As with a CUDA graph, what Python computes while recording is constant afterwards: lengths, branches, cached tensors.
Like CUDA, it refuses to wait for a number, and all that the first run makes is gone.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select"}


class _Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name() in _WAITS:
            raise RuntimeError("operation not permitted when stream is capturing")
        found = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, found))
        return found

    def replay(self):
        for function, args, kwargs, recorded in self.operations:
            found = function(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded), tree_leaves(found), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # views need no copy
                    old.copy_(new)


class TapeGraphs:
    def __init__(self):
        self.recorded, self.replayed = 0, []

    def record(self, run):
        run()
        number, self.recorded = self.recorded, self.recorded + 1
        with _Tape() as tape:
            result = run()

        def replay():
            self.replayed.append(number)
            with torch.inference_mode():
                tape.replay()
            return number

        return replay, result

    def held_bytes(self):
        return self.recorded * 2**20


class Failing(TapeGraphs):
    """The graph with number `at` cannot be recorded, or computes `off` times its numbers."""

    def __init__(self, at, off=1.0):
        super().__init__()
        self.at, self.off = at, off

    def record(self, run):
        if self.recorded == self.at and self.off == 1:
            self.recorded += 1
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        number, (replay, result) = self.recorded, super().record(run)
        return (lambda: result.mul_(self.off if replay() == number == self.at else 1)), result
