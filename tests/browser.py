"""Control a headless Chromium with the DevTools protocol over two pipes, without a port, driver or package."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SWITCHES = ["--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
SWITCHES += ["--no-sandbox", "--hide-scrollbars", "--force-color-profile=srgb", "--disable-background-networking"]
# Chromium reads commands from descriptor 3 and writes answers to 4.
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
PATIENCE = 120.0  # timeout of one command in seconds; a busy machine is slow
KEYS = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Home": 36,
    "End": 35,
    "Escape": 27,
    "Tab": 9,
    "Enter": 13,
}


class Browser:
    """A browser process; `page()` opens a page in it."""

    def __init__(self, folder):
        program = next(filter(None, map(shutil.which, NAMES)), None)
        if program is None:
            pytest.skip(f"Chromium is not installed: none of {', '.join(NAMES)} found")
        (theirs_in, self._to), (self._from, theirs_out) = os.pipe(), os.pipe()
        words = [program, *SWITCHES, f"--user-data-dir={folder}"]
        with (folder / "stderr").open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, str(theirs_in), str(theirs_out), *words],
                pass_fds=(theirs_in, theirs_out),
                stdout=stderr,
                stderr=stderr,
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._rest, self.events = 0, b"", []

    def call(self, method, session=None, **params):
        """Send a command and return its result; events that arrive before it are stored in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {} if session is None else {"sessionId": session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _read(self):
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium did not answer within {PATIENCE:g} seconds"
            part = os.read(self._from, 1 << 20)
            assert part, "Chromium has exited"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def page(self, **options):
        """Open a new page."""
        return Page(self, **options)

    def close(self):
        """End the process."""
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        for end in (self._to, self._from):
            os.close(end)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Page:
    """A page with a size in pixels; `dark` is the preferred color scheme, `phone` emulates a touch screen."""

    def __init__(self, browser, *, width=1280, height=1000, dark=False, phone=False):
        self.browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.prefer("dark" if dark else "light")

    def call(self, method, **params):
        return self.browser.call(method, self.session, **params)

    def prefer(self, scheme):
        """Set the preferred color scheme, "dark" or "light"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, path, drawn="document.documentElement.dataset.complete"):
        """Load a file and wait until its maps are drawn, or until another expression of JavaScript is true."""
        self.call("Page.navigate", url=path.as_uri())
        self.wait(f"location.href !== 'about:blank' && document.readyState === 'complete' && {drawn}")
        return self

    def broken_words(self):
        """Return the visible runs of letters and digits that continue on another line."""
        return self.js(
            r"""(() => {
            const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
            while (texts.nextNode()) {
                const text = texts.currentNode, range = document.createRange();
                if (!text.parentElement.checkVisibility() || text.parentElement.closest("script, style")) continue;
                for (const word of text.data.matchAll(/[\p{L}\p{N}]+/gu)) {
                    range.setStart(text, word.index);
                    range.setEnd(text, word.index + word[0].length);
                    const boxes = [...range.getClientRects()].filter((box) => box.width > 0);
                    if (new Set(boxes.map((box) => Math.round(box.top))).size > 1) found.push(word[0]);
                }
            }
            return found;
            })()"""
        )

    def js(self, expression):
        """Return the value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression):
        """Wait until an expression is true; return its value."""
        end = time.monotonic() + PATIENCE
        while not (value := self.js(expression)):
            assert time.monotonic() < end, f"not true within {PATIENCE:g} seconds: {expression}"
            time.sleep(0.05)
        return value

    def text(self, selector):
        return self.js(f"document.querySelector({json.dumps(selector)}).textContent")

    def texts(self, selector):
        return self.js(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")

    def middle(self, selector, number=0, at=(0.5, 0.5)):
        """Scroll to an element and return the coordinates of a point in it."""
        return self.js(
            f"(() => {{const e = document.querySelectorAll({json.dumps(selector)})[{number}];"
            f"e.scrollIntoView({{block: 'center', inline: 'center'}}); const b = e.getBoundingClientRect();"
            f"return [b.left + {at[0]} * b.width, b.top + {at[1]} * b.height]}})()"
        )

    def hover(self, selector, number=0, at=(0.5, 0.5)):
        x, y = self.middle(selector, number, at)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector, number=0, at=(0.5, 0.5)):
        x, y = self.middle(selector, number, at)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def tap(self, selector, number=0, at=(0.5, 0.5)):
        x, y = self.middle(selector, number, at)
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, *keys):
        for key in keys:
            for kind in ("rawKeyDown", "keyUp"):
                code = KEYS[key]
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def focus(self, selector):
        self.js(f"document.querySelector({json.dumps(selector)}).focus()")

    def screenshot(self, path, whole=False):
        """Write a PNG of the visible part, or of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def _events(self, *methods):
        self.js("0")  # reads the events that have arrived
        return [
            event["params"]
            for event in self.browser.events
            if event.get("sessionId") == self.session and event["method"] in methods
        ]

    def complaints(self):
        """Return the messages on the console, including errors and warnings."""
        return self._events("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")

    def requests(self):
        """Return the URLs that the page requested."""
        return [event["request"]["url"] for event in self._events("Network.requestWillBeSent")]
