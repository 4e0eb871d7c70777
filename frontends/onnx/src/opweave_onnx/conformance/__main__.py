"""``python -m opweave_onnx.conformance [DEVICE,DEVICE...] ...``: the scoreboard as a table of Markdown, for each
placement that is given. ``spread:DEVICE,DEVICE...``: every second node on the second device, where that supports it."""

from __future__ import annotations

import sys

from opweave_onnx.conformance.backend import devices
from opweave_onnx.conformance.scoreboard import markdown

if __name__ == "__main__":
    print(markdown(sys.argv[1:] or [",".join(devices())]))
