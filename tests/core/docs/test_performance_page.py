"""``docs/performance.md`` has a place for each benchmark, and its tables are those of the results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import load_script

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
RESULT = {
    "benchmark": "dispatch",
    "quick": False,
    "machine": {"cpu": "A Processor", "cores": 2, "load_before": 0.1, "load_after": 1.2},
    "rows": [{"additions": 1000, "opweave_us": 234.56, "library": "numpy"}, {"additions": 1, "ratio": 0.12345}],
    "targets": [
        {"name": "1 addition", "value": 2.0, "limit": 20.0, "unit": "us", "met": True},
        {"name": "1,000 additions", "value": 310.0, "limit": 250.0, "unit": "us", "met": False},
    ],
}


@pytest.fixture(scope="module")
def generator() -> Any:
    return load_script("docs/generate_performance.py")


def test_each_benchmark_has_a_place() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py")]
    benchmarks = [name for source in sources for name in re.findall(r'Report\("(\w+)"', source)]
    assert sorted(re.findall(r"<!-- figures: (\w+) -->", PAGE)) == sorted(benchmarks)


def test_a_table_is_replaced_and_nothing_else(generator: Any) -> None:
    page = "before\n<!-- figures: dispatch -->\nold\n<!-- end -->\n<!-- figures: other -->\nkept\n<!-- end -->\n"
    once = generator.written(page, {"dispatch": RESULT})
    assert once == (
        "before\n<!-- figures: dispatch -->\n\nA Processor, 2 cores; load 0.1 before, 1.2 after.\n\n"
        "| additions | opweave us | library | ratio |\n|---:|---:|---|---:|\n"
        "| 1,000 | 235 | numpy |  |\n| 1 |  |  | 0.123 |\n\n"
        "1 of 2 targets are met. Missed: 1,000 additions: 310 of 250 us.\n"
        "<!-- end -->\n<!-- figures: other -->\nkept\n<!-- end -->\n"
    )
    assert generator.written(once, {"dispatch": RESULT}) == once


def test_a_benchmark_without_a_place_is_refused(generator: Any) -> None:
    with pytest.raises(SystemExit, match="no place for dispatch"):
        generator.written("nothing", {"dispatch": RESULT})
