"""The table of what was tested where: every kind of device has a row, and every row says how it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs/support.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| device")
]


def test_every_row_is_tested_or_written():
    for row in ROWS:
        assert len(row) == 4, row
        assert re.match(r"tested (before )?2\d{3}-\d\d-\d\d\b|written, not yet run$", row[-1]), row


@pytest.mark.parametrize(
    "device", ["cpu", "torch:cpu", "torch:cuda", "torch:xpu", "torch:mps", "ort:cpu", "ort:cuda", "opencl:0", "remote:"]
)
def test_every_kind_of_device_of_the_readme_has_a_row(device):
    assert device in (ROOT / "README.md").read_text(encoding="utf-8")
    assert any(device in row[0] for row in ROWS)


def test_the_readme_and_the_pages_of_backends_for_cards_say_that_they_were_not_run_there():
    assert any(row[0].startswith("`torch:cuda") and row[-1].startswith("written") for row in ROWS), (
        "then mend these pages"
    )
    for page in ("README.md", "plugins/torch/README.md", "plugins/opencl/README.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "docs/support.md" in text, page
        assert re.search(r"not been run|not yet run|none of it has been run", text), page
