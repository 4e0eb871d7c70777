"""Chromium without a window, driven over its pipe for debuggers: open a page, run scripts in it, take a picture."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")


class Chromium:
    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        theirs, self._out = os.pipe()
        self._in, answers = os.pipe()
        command = f'exec "$0" "$@" 3<&{theirs} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu",
             "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs)
        os.close(answers)
        self._numbers, self._read, self._session = itertools.count(1), b"", ""
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]

    def _call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._read:
                part = os.read(self._in, 1 << 20)
                assert part, "chromium ended"
                self._read += part
            line, _, self._read = self._read.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def open(self, address: str) -> None:
        self._call("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        return self._call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, f"not within {seconds} s: {condition}"
            time.sleep(0.1)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        os.close(self._out)
        self._process.terminate()
        self._process.wait()
        os.close(self._in)
