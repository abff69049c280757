"""A test that is an `async def` runs in virtual time; with the marker `real_time` on a real event loop, for sockets."""

import asyncio
import functools
import inspect

import pytest

from benchmarks.simulation.virtual_time import virtual

_LONGEST_S = 60.0  # for what hangs


def pytest_configure(config):
    config.addinivalue_line("markers", "real_time: an `async def` test that needs real sockets or threads")


def pytest_itemcollected(item):
    if not (isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj)):
        return
    is_real = item.get_closest_marker("real_time") is not None
    item.obj = in_real_time(item.obj) if is_real else virtual(item.obj)


def in_real_time(test):
    @functools.wraps(test)
    def whole(*args, **more):
        return asyncio.run(asyncio.wait_for(test(*args, **more), _LONGEST_S))

    return whole
