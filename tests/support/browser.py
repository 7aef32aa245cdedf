"""A headless Chromium, driven by the Chrome DevTools protocol over two pipes.

    with Browser(tmp_path) as browser:
        page = browser.open("file:///tmp/report.html", width=1280)
        page.run("document.title")

`CHROMIUM` is its path, None without one: Debian's package is `chromium`.
"""

import base64
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys

from support.waiting import HANG, until

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
ANSWER_SECONDS = 120.0

# Chromium reads commands from descriptor 3 and writes answers to 4
_START = "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 13); os.dup2(w, 14); " + (
    "os.dup2(13, 3); os.dup2(14, 4); os.execv(sys.argv[3], sys.argv[3:])"
)


class Browser:
    """A browser process; leaving the context ends it."""

    def __init__(self, folder):
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        arguments = [
            CHROMIUM,
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-first-run",
            "--disable-extensions",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-gpu",
            "--hide-scrollbars",
            "--force-color-profile=srgb",
            f"--user-data-dir={pathlib.Path(folder) / 'chromium'}",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            "about:blank",
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, str(commands), str(answers), *arguments],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._buffer, self._last, self._events = b"", 0, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(HANG)
        os.close(self._commands)
        os.close(self._answers)

    def open(self, url, *, width=1280, height=800, dark=False):
        """A new page of that size, in pixels."""
        target = self.send("Target.createTarget", {"url": "about:blank"})["targetId"]
        options = {"targetId": target, "flatten": True}
        session = self.send("Target.attachToTarget", options)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.send("Emulation.setEmulatedMedia", {"features": [scheme]})
        page.send("Page.navigate", {"url": url})
        page.wait_for("document.readyState === 'complete'")
        return page

    def send(self, method, parameters=None, session=None):
        """Sends a command and returns its result."""
        self._last += 1
        number = self._last
        command = {"id": number, "method": method, "params": parameters or {}}
        if session:
            command["sessionId"] = session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._events.append(message)

    def events(self, session, *methods):
        """Events of a page that came so far."""
        return [
            e for e in self._events if e.get("sessionId") == session and e.get("method") in methods
        ]

    def _read(self):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], ANSWER_SECONDS)
            assert ready, f"the browser gave no answer in {ANSWER_SECONDS} s"
            data = os.read(self._answers, 1 << 16)
            assert data, "the browser ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def cpu_seconds(self):
        """CPU seconds so far of all processes of the browser, by process id."""
        return {process: cpu_seconds(process) for process in family(self.process.pid)}


class Page:
    """A tab of the browser."""

    def __init__(self, browser, session):
        self._browser, self._session = browser, session

    def send(self, method, parameters=None):
        """Sends a command to this page."""
        return self._browser.send(method, parameters, self._session)

    def run(self, script):
        """The JSON value of a JavaScript expression; promises are awaited."""
        options = {"expression": script, "returnByValue": True, "awaitPromise": True}
        result = self.send("Runtime.evaluate", options)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, script):
        """Waits until a JavaScript expression is true."""
        until(lambda: self.run(f"Boolean({script})"), lambda: f"not true: {script}", pause=0.1)

    def resize(self, width, height=800):
        """Gives the page another size, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", size)

    def mouse(self, kind, x, y):
        """Moves ("mouseMoved"), presses ("mousePressed") or releases ("mouseReleased")."""
        held = 0 if kind == "mouseMoved" else 1
        button = "left" if held else "none"
        options = {"type": kind, "x": x, "y": y, "button": button, "clickCount": held}
        self.send("Input.dispatchMouseEvent", options)

    def screenshot(self, path, *, whole=False):
        """Writes a PNG of the view, or of the whole page."""
        options = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.run("[document.documentElement.scrollWidth, document.body.scrollHeight]")
            options["clip"] = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        data = self.send("Page.captureScreenshot", options)["data"]
        pathlib.Path(path).write_bytes(base64.b64decode(data))

    def problems(self):
        """Errors and warnings of the console, exceptions, and refused requests."""
        self.run("0")
        logged = self._browser.events(self._session, "Log.entryAdded", "Runtime.exceptionThrown")
        called = self._browser.events(self._session, "Runtime.consoleAPICalled")
        return logged + [e for e in called if e["params"]["type"] in ("error", "warning", "assert")]

    def requests(self):
        """URLs that the page has requested."""
        events = self._browser.events(self._session, "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in events]


def family(process):
    """A process and its descendants, by id (Linux)."""
    path = pathlib.Path(f"/proc/{process}/task/{process}/children")
    try:
        children = [int(word) for word in path.read_text().split()]
    except FileNotFoundError:
        children = []
    return [process, *(one for child in children for one in family(child))]


def cpu_seconds(process):
    """CPU seconds of a process so far; 0 if it has ended (Linux)."""
    try:
        words = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
