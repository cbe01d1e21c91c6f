"""A real browser for tests of the page, driven through chromedriver's HTTP interface."""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
import subprocess
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
DRIVER = shutil.which("chromedriver")
IS_AVAILABLE = bool(CHROMIUM and DRIVER)
AXE = importlib.util.find_spec("axe_playwright_python")

_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


class Browser:
    """One session of a browser."""

    def __init__(self, address, profile, arguments):
        self._address = address
        options = {
            "binary": CHROMIUM,
            "args": [*_ARGUMENTS, *arguments, f"--user-data-dir={profile}"],
        }
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        started = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._address += f"/session/{started['sessionId']}"

    def _send(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def visit(self, address):
        """Open a page, and return when it is there to its end."""
        self._send("POST", "/url", {"url": address})
        # The driver answers too early now and then, after pages whose scripts were switched off.
        complete = f"return location.href === {json.dumps(address)}"
        complete += " && document.readyState === 'complete'"
        if not self.wait_until(complete):
            raise TimeoutError(f"{address} was not loaded to its end")

    def run(self, script):
        """Return what a script in the page returns; the page's own policy does not bind it."""
        return self._send("POST", "/execute/sync", {"script": script, "args": []})

    def enter_frame(self, number):
        """Run what follows in a frame of the page."""
        self._send("POST", "/frame", {"id": number})

    def leave_frame(self):
        """Run what follows in the page itself."""
        self._send("POST", "/frame", {"id": None})

    def command(self, name, **options):
        """Send a command of the browser's own protocol, and return its answer."""
        return self._send("POST", "/goog/cdp/execute", {"cmd": name, "params": options})

    def resize(self, width, height=900):
        """Give the page so much room, in pixels."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def print_pdf(self, **options):
        """Return the page as PDF."""
        return base64.b64decode(self.command("Page.printToPDF", **options)["data"])

    def picture(self, path, width):
        """Take a picture of the whole page."""
        self.resize(width)
        height = self.run("return document.documentElement.scrollHeight")
        area = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        options = {"format": "png", "captureBeyondViewport": True, "clip": area}
        path.write_bytes(
            base64.b64decode(self.command("Page.captureScreenshot", **options)["data"])
        )

    def wait_until(self, script, seconds=30.0):
        """Wait until a script returns something true, and say whether it did."""
        deadline = time.monotonic() + seconds
        while not self.run(script):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def violations(self):
        """Return what axe finds in the page, with everything unfolded, that keeps anybody out."""
        script = Path(AXE.submodule_search_locations[0], "axe.min.js").read_text(encoding="utf-8")
        self.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        self.run(f"{script}; axe.run().then((found) => {{ window.found = found; }})")
        assert self.wait_until("return Boolean(window.found)")
        return self.run("return found.violations.map((v) => `${v.id}: ${v.nodes[0].html}`)")

    def complaints(self):
        """Return what the page wrote to its console, refusals by its policy among it."""
        entries = self._send("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries]

    def requests(self, document):
        """Return the addresses that a document has asked for, its own first."""
        entries = self._send("POST", "/se/log", {"type": "performance"})
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        # The browser's own start page is loaded before.
        return [one["request"]["url"] for one in sent if one["documentURL"] == document]

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self._send("GET", "/screenshot")))

    def close(self):
        self._send("DELETE", "")


@contextmanager
def browser(profile, *arguments):
    """Start a browser with an empty profile folder; end it afterwards."""
    driver = subprocess.Popen(
        [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        line = next(line for line in driver.stdout if "started successfully on port" in line)
        port = line.rsplit(" ", 1)[1].strip(".\n")
        session = Browser(f"http://127.0.0.1:{port}", profile, arguments)
        try:
            yield session
        finally:
            session.close()
    finally:
        driver.terminate()
        driver.wait()
        driver.stdout.close()
