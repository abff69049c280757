"""An event loop whose clock jumps: what sleeps takes no time, and hours of messages pass in a second."""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_TURN_S = 1e-9
_LOOK_EVERY = 16  # turns
MOST_TURNS = 500_000  # of the loop: what takes more than a test does will not come to rest


class _Jumping(selectors.SelectSelector):
    def __init__(self, most_turns: int) -> None:
        super().__init__()
        self.now = 0.0
        self.turns_left = most_turns

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.turns_left -= 1
        assert self.turns_left > 0, "it does not come to rest"
        # Nothing comes from outside; signals are looked for now and then, since each look costs a system call.
        ready = [] if timeout and self.turns_left % _LOOK_EVERY else super().select(0)
        if not ready:
            assert timeout is not None, "everything waits, and nothing will come"
            self.now += max(timeout, _TURN_S)  # a timer that is due within rounding fires without moving the clock
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self, most_turns: int = MOST_TURNS) -> None:
        self._jumping = _Jumping(most_turns)
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, T], most_turns: int = MOST_TURNS) -> T:
    """Run the coroutine `main`; what goes wrong in any task fails it."""
    problems: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(most_turns)) as runner:
        runner.get_loop().set_exception_handler(lambda _, context: problems.append(context))
        result = runner.run(main)
    assert not problems, problems
    return result


def virtual(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Make a plain function of an async one: it runs in virtual time.

    Tests of `tests/unit` need it only below `hypothesis.given`: there an `async def` runs in virtual time anyway.
    """

    @functools.wraps(test)
    def whole(*args: P.args, **more: P.kwargs) -> T:
        return run(test(*args, **more))

    return whole
