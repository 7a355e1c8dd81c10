"""A real headless Chromium for tests, by its debugging protocol over a pipe: no driver and no package is needed.

``FACTORIZED_CHROMIUM`` names the program where it is not on the path; then the tests that need it fail without it, and
are not left out.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

VARIABLE = "FACTORIZED_CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-features=Translate,MediaRouter,OptimizationHints", "--remote-debugging-pipe"),
)
# Chromium reads commands from descriptor 3 and answers on 4
AS_3_AND_4 = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for place, end in zip((3, 4), ends):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
PATIENCE = 120.0  # seconds for an answer, on a machine that has much else to do


def find_chromium() -> str:
    """Return the path of Chromium; skip where there is none, and fail where one is named and missing."""
    named = os.environ.get(VARIABLE, "")
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        told = pytest.fail if named else pytest.skip
        told(f"the page of `factorized report` is opened in {named or 'Chromium'}: apt-get install chromium")
    return found


class Browser:
    """A running Chromium with one page."""

    def __init__(self, profile: Path) -> None:
        command = [find_chromium(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        to_read, self.to_write = os.pipe()
        self.to_hear, to_tell = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", AS_3_AND_4, str(to_read), str(to_tell), *command],
            pass_fds=(to_read, to_tell),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_tell)
        self.number, self.heard, self.session = 0, b"", ""
        self.errors: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> Self:
        try:
            self._attach()
        except BaseException:
            self.close()
            raise
        return self

    def _attach(self) -> None:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Page", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the program."""
        os.close(self.to_write)  # it ends when nobody can speak to it any more
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.to_hear)

    def open(self, page: Path, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Show a page of the disk on a screen of this size; a narrow one is a phone's."""
        phone = width < 600
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.ask("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.errors.clear()
        self.requests.clear()
        self.ask("Page.navigate", url=page.resolve().as_uri())
        until = time.monotonic() + PATIENCE
        while self.run("document.readyState") != "complete" and time.monotonic() < until:
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def screenshot(self, *, whole: bool = False) -> bytes:
        """Return what is on the screen, or the whole page, as PNG."""
        data: str = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        return base64.b64decode(data)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, note what happens meanwhile, and return the answer."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            answer = self._hear(until, method)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _hear(self, until: float, method: str) -> dict[str, Any]:
        while b"\0" not in self.heard:
            ready, _, _ = select.select([self.to_hear], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self.to_hear, 2**16) if ready else b""
            if not part:
                raise AssertionError(f"Chromium did not answer {method}")
            self.heard += part
        message, _, self.heard = self.heard.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, told = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(told["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.errors.append(str(told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(told["entry"]["text"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
