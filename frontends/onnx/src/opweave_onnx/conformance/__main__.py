"""``python -m opweave_onnx.conformance [DEVICE,DEVICE...]``: the scoreboard as a table of Markdown."""

from __future__ import annotations

import sys

from opweave_onnx.conformance.backend import devices
from opweave_onnx.conformance.scoreboard import markdown

if __name__ == "__main__":
    placements = [text.split(",") for text in sys.argv[1:]] or [devices()]
    print(markdown(placements))
