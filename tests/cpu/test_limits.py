"""No bare number decides which path of a kernel runs: such numbers are limits, which the conformance suite sets."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

import opweave_cpu

NUMBERS: Final = {
    ("activations.py", "1 << 31"): "the range of i32",
    ("activations.py", "15"): "the largest value of 4 bits",
    ("argmax.py", "1 << 31"): "the range of i32",
    ("argmax.py", "LANES"): "lanes of a register",
    ("batched_products.py", "LANES"): "lanes of a register",
    ("blocks.py", "4"): "scales that have their bits in one byte",
    ("compiler.py", "TOGETHER"): "how many functions are compiled at a time",
    ("half_products.py", "16"): "rows of weights in a register",
    ("integer_products.py", "16"): "rows of weights in a register",
    ("integer_products.py", "LANES"): "lanes of a register",
    ("integers.py", "15"): "the largest value of 4 bits",
    ("integers.py", "BYTES"): "bytes of a register",
    ("sorting.py", "PART"): "read while it runs: how many values are candidates decides, not a size",
    ("transpose.py", "LANES"): "lanes of a register",
    ("writer.py", "LANES"): "lanes of a register",
}
"""File and number of what is compared with and is no choice by size, and what it is instead."""

ORDER: Final = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def bare(source: str) -> set[str]:
    """The constants and numbers above 2 that sizes are compared with in ``source`` and that are no limit's value."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare) or not any(isinstance(op, ORDER) for op in node.ops):
            continue
        inside = list(ast.walk(node))
        values = [m for m in inside if isinstance(m, ast.Attribute) and m.attr == "value"]
        declared = {id(m.value) for m in values}
        shifts = [m for m in inside if isinstance(m, ast.BinOp) and isinstance(m.op, ast.LShift)]
        powers = [m for m in shifts if isinstance(m.left, ast.Constant) and isinstance(m.right, ast.Constant)]
        parts = {id(part) for m in powers for part in (m.left, m.right)}
        found |= {ast.unparse(m) for m in powers}
        for m in inside:
            if isinstance(m, ast.Name) and m.id.isupper() and id(m) not in declared and m.id != "WORK":
                found.add(m.id)
            if isinstance(m, ast.Constant) and type(m.value) is int and m.value > 2 and not values:
                found |= set() if id(m) in parts else {str(m.value)}
    return found


def test_the_scan_sees_numbers_and_lets_limits_pass():
    assert bare("if n > LONGEST and k <= 8 and m < 1 << 20: pass") == {"LONGEST", "8", "1 << 20"}
    assert bare("if n > LONGEST.value or x.nbytes >= 4 * SPREAD.value or n > 1: pass") == set()


def test_numbers_that_decide_between_paths_are_declared():
    (root,) = opweave_cpu.__path__
    found = {(path.name, number) for path in Path(root).rglob("*.py") for number in bare(path.read_text("utf-8"))}
    assert found - NUMBERS.keys() == set(), "make it a limit()"
    assert NUMBERS.keys() - found == set(), "no reason outlives its number"
