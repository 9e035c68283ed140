"""Drives a headless Chromium over its debugging pipe. Messages are JSON and end with a zero byte."""

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A Chromium with a page of `width` x `height` pixels. `errors`: the page's errors and
    policy violations.
    """

    def __init__(self, *, width: int = 1440, height: int = 900, dark: bool = False, timeout: float = 60):
        self.errors: list[str] = []
        self._timeout, self._number, self._buffer = timeout, 0, b""
        # Child processes may write to this folder shortly after the browser has ended.
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # The browser reads `ours` as descriptor 3 and writes to `its` as descriptor 4.
        ours, its = os.pipe(), os.pipe()
        self._out, self._in = ours[1], its[0]
        command = [
            chromium(),
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            f"--user-data-dir={self._home.name}",
            f"--window-size={width},{height}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        # The shell moves both pipe ends to descriptors 3 and 4.
        script = f'exec "$@" 3<&{ours[0]} 4>&{its[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "browser", *command],
            pass_fds=(ours[0], its[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(ours[0])
        os.close(its[1])
        target = self.call("Target.createTarget", url="about:blank", session="")["targetId"]
        self._session = ""
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, session: str | None = None, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        session = getattr(self, "_session", "") if session is None else session
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _note(self, message: dict) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def _read(self) -> dict:
        end = time.monotonic() + self._timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser is gone"
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("Boolean(window.mmengineReport)")

    def run(self, script: str):
        """Evaluate an expression in the page, await a promise, and return the value."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression in the page is true."""
        end = time.monotonic() + self._timeout
        while not self.run(condition):
            assert time.monotonic() < end, f"it never came true: {condition}"
            time.sleep(0.02)

    def key(self, key: str, *, shift: bool = False) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 * shift)

    def mouse(self, kind: str, x: float, y: float, **more) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        os.close(self._out)
        self._process.terminate()
        self._process.wait(10)
        with suppress(ProcessLookupError):  # no child process remains
            os.killpg(self._process.pid, signal.SIGKILL)
        os.close(self._in)
        self._home.cleanup()
