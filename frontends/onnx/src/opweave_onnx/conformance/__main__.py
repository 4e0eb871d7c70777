"""``python -m opweave_onnx.conformance [DEVICE,DEVICE...] ...``: the scoreboard as a table of Markdown, for each
placement that is given."""

from __future__ import annotations

from argparse import ArgumentParser

import opweave as ow
from opweave_onnx.conformance.backend import devices
from opweave_onnx.conformance.scoreboard import markdown


def main() -> None:
    parser = ArgumentParser("python -m opweave_onnx.conformance", description="Runs ONNX's own tests of backends.")
    parser.add_argument(
        "placement", nargs="*", default=[",".join(devices())],
        help="devices, with commas between them, that are preferred in this order; with spread: in front every second "
        "node runs on the second device, where that supports it",
    )  # fmt: skip
    given: list[str] = parser.parse_args().placement
    for placement in given:
        for name in placement.removeprefix("spread:").split(","):
            try:
                ow.device(name)
            except ow.OpweaveError as error:
                parser.error(str(error))
    print(markdown(given))


if __name__ == "__main__":
    main()
