"""A real headless Chromium for tests, spoken to through its DevTools protocol over two pipes.

Needs nothing but the standard library and a `chromium` on PATH.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--disable-extensions", "--no-default-browser-check",
    "--disable-popup-blocking", "--hide-scrollbars", "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)  # fmt: skip
# The browser wants its pipes to be descriptors 3 and 4.
_HANDOVER = """
import fcntl, os, sys
high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in map(int, sys.argv[1:3])]
os.dup2(high[0], 3)
os.dup2(high[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
PATIENCE = 300.0  # seconds for any one answer: the machine may be loaded


def binary() -> str | None:
    """The browser's command; None where there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


def why_not() -> str | None:
    """What is missing on this machine; None when the browser can run."""
    return None if binary() else "needs a Chromium on PATH to look at the page"


class Browser:
    """A running browser. `open` gives a tab."""

    def __init__(self, width: int = 1200, height: int = 800) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_it, self._write = os.pipe()
        self._read, from_it = os.pipe()
        command = [
            sys.executable, "-c", _HANDOVER, str(to_it), str(from_it), str(binary()), *FLAGS,
            f"--user-data-dir={self._folder.name}", f"--window-size={width},{height}",
            "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, pass_fds=(to_it, from_it),
        )  # fmt: skip
        os.close(to_it)
        os.close(from_it)
        self._size = (width, height)
        self._buffer = b""
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.ask("Target.setDiscoverTargets", discover=True)

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of one command. Raises: RuntimeError with the browser's words."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        limit = time.monotonic() + PATIENCE
        while number not in self._answers:
            self._receive(limit - time.monotonic())
        answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def listen(self, seconds: float) -> None:
        """Takes what the browser says until it is silent, or for this long."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            self._receive(limit - time.monotonic(), needed=False)

    def _receive(self, seconds: float, *, needed: bool = True) -> None:
        ready, _, _ = select.select([self._read], [], [], max(seconds, 0))
        if not ready:
            if needed:
                raise RuntimeError("the browser does not answer")
            return
        data = os.read(self._read, 1 << 20)
        if not data:
            raise RuntimeError("the browser ended")
        *messages, self._buffer = (self._buffer + data).split(b"\0")
        for text in messages:
            message = json.loads(text)
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self.events.append(message)

    def open(self, url: str, *, ready: str = "window.hocket && hocket.isReady") -> Tab:
        """A new tab, once `ready` is true in it."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        tab = self.attach(target)
        width, height = self._size
        tab.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        tab.go(url, ready)
        return tab

    def attach(self, target: str) -> Tab:
        """The tab of a target."""
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Tab(self, session, target)

    def targets(self) -> list[dict[str, Any]]:
        """Every tab: its url, its title."""
        return self.ask("Target.getTargets")["targetInfos"]

    def close(self) -> None:
        """Ends the browser."""
        try:
            self.ask("Browser.close")
        except (RuntimeError, OSError):
            self._process.kill()
        self._process.wait(timeout=PATIENCE)
        os.close(self._write)
        os.close(self._read)
        self._folder.cleanup()


class Tab:
    """One page of a browser."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of one command to this page."""
        return self._browser.ask(method, self._session, **parameters)

    def go(self, url: str, ready: str = "window.hocket && hocket.isReady") -> None:
        """Loads an address."""
        self.ask("Page.navigate", url=url)
        self.until(ready)

    def run(self, code: str) -> Any:
        """The value of an expression in the page, promises waited for."""
        found = self.ask(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True,
            userGesture=True,
        )  # fmt: skip
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return found["result"].get("value")

    def until(self, condition: str, seconds: float = PATIENCE) -> None:
        """Waits until an expression is true."""
        limit = time.monotonic() + seconds
        while True:
            try:
                if self.run(f"Boolean({condition})"):
                    return
            except RuntimeError as error:
                if "context" not in str(error) and "defined" not in str(error):
                    raise
            if time.monotonic() > limit:
                raise RuntimeError(f"not true after {seconds:g} s: {condition}; {self.complaints}")
            time.sleep(0.02)

    def settle(self) -> None:
        """Waits for two frames, so that what was asked for is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def move(self, x: float, y: float) -> None:
        """Moves the pointer, in pixels of the page."""
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Moves there, presses and releases."""
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def wheel(self, x: float, y: float, by: float) -> None:
        """Turns the wheel there."""
        self.ask("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)
        self.settle()

    def touch(self, *steps: Sequence[tuple[float, float]]) -> None:
        """Puts fingers down, moves them to each next places, and lifts them."""
        for kind, places in zip(("touchStart", *["touchMove"] * len(steps)), steps, strict=False):
            points = [{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(places)]
            self.ask("Input.dispatchTouchEvent", type=kind, touchPoints=points)
        self.ask("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.settle()

    def key(self, key: str) -> None:
        """Presses a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def hash(self) -> str:
        """What the address holds, once the page has written its last state there."""
        self.until("!hocket.writing")
        return self.run("location.hash")

    def picture(self) -> Picture:
        """The page as it looks now."""
        return Picture(b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings that the page's console has shown."""
        out = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            parameters = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                out.append(details.get("exception", {}).get("description", details["text"]))
            elif event["method"] == "Runtime.consoleAPICalled":
                if parameters["type"] in ("error", "warning", "assert"):
                    out.append(str([a.get("value") for a in parameters["args"]]))
            elif event["method"] == "Log.entryAdded":
                entry = parameters["entry"]
                if entry["level"] in ("error", "warning"):
                    out.append(entry["text"])
        return out

    def close(self) -> None:
        """Closes the tab."""
        self._browser.ask("Target.closeTarget", targetId=self._target)


class Picture:
    """A PNG of 8 bits a channel, decoded: `at(x, y)` is (red, green, blue)."""

    def __init__(self, png: bytes) -> None:
        self.png = png
        at, data = 8, b""
        while at < len(png):
            (length,), kind = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
            body = png[at + 8 : at + 8 + length]
            if kind == b"IHDR":
                self.width, self.height, depth, colour = struct.unpack(">IIBB", body[:10])
                assert depth == 8 and colour in (2, 6)
                self._channels = 3 if colour == 2 else 4
            elif kind == b"IDAT":
                data += body
            at += 12 + length
        self._rows = self._unfiltered(zlib.decompress(data))

    def at(self, x: float, y: float) -> tuple[int, int, int]:
        """The colour of one pixel."""
        k = int(x) * self._channels
        red, green, blue = self._rows[int(y)][k : k + 3]
        return red, green, blue

    def save(self, path: str | Path) -> None:
        """Writes the PNG, for a look at it."""
        Path(path).write_bytes(self.png)

    def _unfiltered(self, data: bytes) -> list[bytearray]:
        n, wide = self._channels, self.width * self._channels
        rows, above = [], bytearray(wide)
        for y in range(self.height):
            start = y * (wide + 1)
            row = bytearray(data[start + 1 : start + 1 + wide])
            _FILTERS[data[start]](row, above, n)
            rows.append(row)
            above = row
        return rows


def _sub(row: bytearray, above: bytearray, n: int) -> None:
    for i in range(n, len(row)):
        row[i] = (row[i] + row[i - n]) & 255


def _up(row: bytearray, above: bytearray, n: int) -> None:
    for i in range(len(row)):
        row[i] = (row[i] + above[i]) & 255


def _average(row: bytearray, above: bytearray, n: int) -> None:
    for i in range(len(row)):
        left = row[i - n] if i >= n else 0
        row[i] = (row[i] + (left + above[i]) // 2) & 255


def _paeth(row: bytearray, above: bytearray, n: int) -> None:
    for i in range(len(row)):
        a, b, c = (row[i - n], above[i], above[i - n]) if i >= n else (0, above[i], 0)
        p = a + b - c
        near = min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))[2]
        row[i] = (row[i] + near) & 255


_FILTERS = (lambda row, above, n: None, _sub, _up, _average, _paeth)
