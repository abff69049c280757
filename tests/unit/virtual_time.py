"""An event loop whose clock jumps: what sleeps takes no time, and hours of messages pass in a second."""

from __future__ import annotations

import asyncio
import selectors

_TURN_S = 1e-9


class _Jumping(selectors.SelectSelector):
    now = 0.0
    turns = 0

    def select(self, timeout=None):
        self.turns += 1
        assert self.turns < 100_000, "it does not come to rest"
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits, and nothing will come"
            self.now += max(timeout, _TURN_S)  # a timer that is due within rounding fires without moving the clock
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self):
        return self._jumping.now


def run(main):
    """Run the coroutine `main`; what goes wrong in any task fails it."""
    problems = []
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.get_loop().set_exception_handler(lambda _, context: problems.append(context))
        result = runner.run(main)
    assert not problems, problems
    return result
