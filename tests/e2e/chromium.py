"""A headless Chromium, driven over its DevTools protocol (https://chromedevtools.github.io/devtools-protocol)."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from base64 import b64decode
from itertools import count
from pathlib import Path

import pytest
from websockets.sync.client import connect

from tests.kit.service import wait_until

WAIT_S = 120  # for what a page does: nothing here is about speed
BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server"),
    *("--remote-debugging-port=0", "--window-size=1100,900"),
)


class Tab:
    """The one tab of a browser. `asked`: the URLs that it asked for; `complaints`: errors in its console."""

    def __init__(self, socket):
        self._socket, self._numbers = socket, count(1)
        self.asked, self.complaints = [], []
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        """The result of a command; what the browser says before it is noted."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (said := json.loads(self._socket.recv(WAIT_S))).get("id") != number:
            self._note(said["method"], said["params"])
        assert "error" not in said, said
        return said["result"]

    def _note(self, event, told):
        if event == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(told["exceptionDetails"])
        elif event == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.complaints.append(told["entry"])

    def open(self, url):
        self.send("Page.navigate", url=url)

    def run(self, script):
        """The value of a script, which may be a promise."""
        done = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def text(self, selector):
        """What is seen of an element; empty where there is none, or where it is hidden."""
        found = f"document.querySelector({json.dumps(selector)})"
        return self.run(f"{found}?.checkVisibility() ? {found}.innerText : ''")

    def wait_for(self, selector, words):
        """Until the element shows these words. Returns all that it shows."""
        found = [""]

        def shows():
            found[0] = self.text(selector)
            return words in found[0]

        try:
            wait_until(shows, f"{words!r} in {selector}", WAIT_S)
        except AssertionError as error:
            error.add_note(f"it shows {found[0]!r}; the page: {self.text('body')!r}; {self.complaints}")
            raise
        return found[0]

    def write(self, selector, text):
        self.run(f"document.querySelector({json.dumps(selector)}).value = {json.dumps(text)}; 0")

    def click(self, selector):
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def picture(self, *, dark=False):
        """The whole page, as PNG."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        return b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"])


@contextlib.contextmanager
def browser():
    """A tab of a new browser without any past. Skips the test where there is no Chromium."""
    if BINARY is None:
        pytest.skip("there is no Chromium here: the page is not tested in a browser (apt-get install chromium)")
    folder = Path(tempfile.mkdtemp(prefix="chromium-"))
    stderr = folder / "stderr.txt"
    with stderr.open("w") as log:
        process = subprocess.Popen(
            [BINARY, *OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            stdout=log, stderr=log, start_new_session=True, env={**os.environ, "HOME": str(folder)},
        )  # fmt: skip
    try:
        with connect(_address(process, folder / "profile" / "DevToolsActivePort", stderr), **_WHOLE) as socket:
            yield Tab(socket)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


_WHOLE = {"max_size": None, "proxy": None, "open_timeout": WAIT_S}


def _address(process, port_file, stderr):
    """Of the tab, once the browser says where it listens."""

    def has_started():
        assert process.poll() is None, f"Chromium did not start:\n{stderr.read_text()[-3000:]}"
        return port_file.exists() and port_file.read_text().count("\n")

    try:
        wait_until(has_started, "Chromium's port", WAIT_S)
    except AssertionError as error:
        error.add_note(stderr.read_text()[-3000:])
        raise
    port = port_file.read_text().split()[0]
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"http://127.0.0.1:{port}/json/list", timeout=WAIT_S) as answer:
        return next(tab["webSocketDebuggerUrl"] for tab in json.load(answer) if tab["type"] == "page")
