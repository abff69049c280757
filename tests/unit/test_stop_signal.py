"""Ctrl-C is heard whichever thread the kernel gives it to."""

import subprocess
import sys
import threading

import pytest

from serve_app.local.finish import StopSignal

WAITS = """
import signal, sys, threading, time
from serve_app.local.finish import StopSignal

def to_this_thread(number):
    while not waits:
        time.sleep(0.001)
    time.sleep(0.05)
    signal.pthread_kill(threading.get_ident(), number)
    time.sleep(60)  # it lives on, as threads of Ray do

waits = []
for number in [signal.SIGINT, signal.SIGTERM] * 2:
    stop = StopSignal()
    stop.listen()
    threading.Thread(target=to_this_thread, args=(number,), daemon=True).start()
    waits.append(True)
    assert stop.wait()
    waits.clear()
print("heard", flush=True)
"""


def test_a_signal_that_another_thread_gets_is_heard():
    """An Event that waits without a timeout sleeps on for ever."""
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, "heard\n"), done.stderr


@pytest.mark.parametrize("timeout_s", [0, 0.01])
def test_nothing_came(timeout_s):
    assert threading.current_thread() is threading.main_thread()
    stop = StopSignal()
    assert not stop.wait(timeout_s)
