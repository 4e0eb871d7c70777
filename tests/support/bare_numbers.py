"""Numbers in sources that sizes are compared with: they decide between ways through kernels."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

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


def bare_numbers(root: str) -> set[tuple[str, str]]:
    """File below ``root`` and number, of all that are `bare`."""
    paths = Path(root).rglob("*.py")
    return {(p.relative_to(root).as_posix(), number) for p in paths for number in bare(p.read_text("utf-8"))}
