"""The example that reads pictures: what is written in them comes out, whatever devices compute."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("rapidocr_onnxruntime") is None or find_spec("PIL") is None:
    pytest.skip("pip install --no-deps -r requirements/models.txt", allow_module_level=True)

from examples import ocr

LINES = ("Reading is fun", "Order 66: 12.50")


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "torch:cpu", "ort:cpu"], ["ort:cpu", "cpu"]], ids=",".join)
def test_text_in_a_picture_is_read(devices):
    networks = ocr.load(devices)
    assert [networks[job].scheduler.devices[0].name for job in networks] == [
        devices[i % len(devices)] for i in range(3)
    ]
    assert [*ocr.read(ocr.picture(LINES), networks)] == [*LINES]
    assert [*ocr.read(ocr.picture(LINES[:1], upside_down=(0,)), networks)] == [LINES[0]]
    for network in networks.values():
        network.close()
