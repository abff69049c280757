"""An event loop whose clock jumps, so that sleeping takes no time, and hours of messages pass in a second."""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_TURN_S = 1e-9
_LOOK_EVERY = 16  # turns
MOST_TURNS = 500_000  # of the loop; a test that needs more will never end


class _Jumping(selectors.SelectSelector):
    def __init__(self, most_turns: int) -> None:
        super().__init__()
        self.now = 0.0
        self.turns_left = most_turns

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.turns_left -= 1
        assert self.turns_left > 0, "it does not come to rest"
        # Nothing comes from outside. Signals are checked only now and then, because each check is a system call.
        ready = [] if timeout and self.turns_left % _LOOK_EVERY else super().select(0)
        if not ready:
            assert timeout is not None, "everything waits, and nothing will come"
            self.now += max(timeout, _TURN_S)  # a timer due within rounding fires without moving the clock
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self, most_turns: int = MOST_TURNS) -> None:
        self._jumping = _Jumping(most_turns)
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, T], most_turns: int = MOST_TURNS) -> T:
    """Run the coroutine `main`. An error in any task fails it."""
    problems: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(most_turns)) as runner:
        runner.get_loop().set_exception_handler(lambda _, context: problems.append(context))
        result = runner.run(main)
    assert not problems, problems
    return result


def virtual(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Turn an async function into a plain one that runs in virtual time.

    In `tests/unit`, an `async def` runs in virtual time anyway; tests need this only under `hypothesis.given`.
    """

    @functools.wraps(test)
    def whole(*args: P.args, **more: P.kwargs) -> T:
        return run(test(*args, **more))

    return whole
