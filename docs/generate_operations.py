"""Writes ``docs/operations.md`` from the definitions of the operations and the tables of the backends' kernels.

Run it after an operation or a kernel was added: ``python docs/generate_operations.py``. What it says of a backend comes
from the package's kernels, so both of ours have to be installed; no device is needed.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import opweave
from opweave import ops
from opweave.dtypes import DTYPES, DType
from opweave.kernels import Kernel, KernelTable
from opweave.opdef import OPS, OpDef

PAGE: Final = Path(__file__).with_name("operations.md")
BACKENDS: Final = ("cpu", "opencl")

HEAD: Final = """\
# Operations

<!-- Written by docs/generate_operations.py: change the definitions, not this page. -->

Every operation, by family; a family is a module of `opweave.ops`, and its kernels are in the module of the same name of
each backend. A definition holds the shape rule, the reference in NumPy that any kernel is proven against, the cost, and
which sources the result may overwrite.

Tensors are written as NumPy writes arrays; operands of two-sided operations broadcast and are promoted. Half types
compute in f32 and store rounded. Views cost nothing and never reach a device. The `host` device runs
the reference of every operation, for any dtype and layout; what the other backends have kernels for is said with each.
A kernel may ask for more than its types and layouts; `device.why_not(step)` gives the reason of a refusal.
"""

LAYOUTS: Final = {"dense": "packed operands", "rows": "packed rows", "strided": "any strides"}


def tables() -> dict[str, KernelTable]:
    """The kernels of each of our backends that is installed."""
    found = {}
    for name in BACKENDS:
        try:
            found[name] = import_module(f"opweave_{name}.kernels").KERNELS
        except ImportError:
            continue
    return found


def render(kernels: Mapping[str, KernelTable]) -> str:
    """The page."""
    families = _families()
    lines = [HEAD]
    for family, members in families.items():
        names = ", ".join(f"[{name}](#{name})" for name in members)
        lines.append(f"- **[{family}](#{family}-operations)**: {names}")
    for family, members in families.items():
        lines += ["", f"## {family} operations", "", _flow(_paragraph(_family_doc(family)))]
        for name in members:
            lines += ["", f"### {name}", "", *_operation(name, kernels)]
    return "\n".join(lines) + "\n"


def without_support(page: str) -> str:
    """The page without what it says of backends."""
    return "\n".join(line for line in page.splitlines() if not re.match(rf"- ({'|'.join(BACKENDS)}): ", line))


def _families() -> dict[str, list[str]]:
    """Family -> its operations as they are defined, then the functions that are made of others."""
    families: dict[str, list[str]] = {}
    for name, op in OPS.items():
        if op.family != "third-party":
            families.setdefault(op.family, []).append(name)
    for name in sorted(set(ops.__all__) - set(OPS)):
        families.setdefault(getattr(ops, name).__module__.rpartition(".")[2], []).append(name)
    return dict(sorted(families.items()))


def _family_doc(family: str) -> str:
    return inspect.getdoc(sys.modules[f"opweave.ops.{family}"]) or ""


def _operation(name: str, kernels: Mapping[str, KernelTable]) -> Iterator[str]:
    op = OPS.get(name)
    build: Callable[..., Any] | None = getattr(ops, name, None) or (op.build if op else None)
    if build is not None:
        yield f"`{_signature(name, build)}`"
        yield ""
        yield from _description(inspect.getdoc(build) or "")
    else:
        yield "Made by the builders of others, which say when."
    yield ""
    if op is None:
        yield "Made of other operations; runs wherever those run."
        return
    yield ". ".join([*([f"Formula: `{op.formula}`"] if op.formula else []), *_facts(op)]) + "."
    if not op.is_view:
        yield ""
        for backend, table in kernels.items():
            yield f"- {backend}: {_support(op, table)}"


def _facts(op: OpDef) -> Iterator[str]:
    if op.is_view:
        yield "A view"
    if op.writes:
        yield "Writes its first source, a state"
    if op.inplace:
        yield f"May overwrite {' or '.join(f'source {i}' for i in op.inplace)}"
    if op.pointwise:
        yield "Element by element"


def _signature(name: str, build: Callable[..., Any]) -> str:
    parts = []
    bare = False
    for parameter in inspect.signature(build).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not bare:
            parts.append("*")
        bare = bare or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        plain = parameter.replace(annotation=parameter.empty)
        parts.append(str(plain))
    where = "ow" if name in opweave.__all__ else "opweave.ops"
    return f"{where}.{name}({', '.join(parts)})"


def _support(op: OpDef, table: KernelTable) -> str:
    candidates = table.candidates(op.name)
    if not candidates:
        return "no kernel"
    by_layout: dict[str, list[Kernel]] = {}
    for kernel in candidates:
        by_layout.setdefault(kernel.layout, []).append(kernel)
    parts = []
    for layout, group in by_layout.items():
        dtypes = frozenset[DType]().union(*(kernel.dtypes for kernel in group))
        parts.append(f"{_dtypes(dtypes)} ({LAYOUTS[layout]})")
    if any(kernel.inplace for kernel in candidates):
        parts.append("in place")
    return ", ".join(parts)


def _dtypes(dtypes: frozenset[DType]) -> str:
    blocks = [t for t in DTYPES.values() if t.is_quantized]
    if dtypes.issuperset(blocks):
        return " ".join([t.name for t in DTYPES.values() if t in dtypes and not t.is_quantized] + ["and all blocks"])
    return " ".join([t.name for t in DTYPES.values() if t in dtypes])


# --- docstrings as Markdown -----------------------------------------------------------------------------------------


def _paragraph(doc: str) -> str:
    return doc.partition("\n\n")[0]


def _flow(text: str) -> str:
    """One line of Markdown of wrapped lines."""
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split()))


def _description(doc: str) -> Iterator[str]:
    """What a docstring says, without what is raised."""
    text, *sections = re.split(r"^(Args|Returns|Raises):\n", doc, flags=re.MULTILINE)
    body = text.rstrip()
    yield "\n\n".join(_flow(p) for p in re.split(r"\n\s*\n", body))
    for title, content in zip(sections[::2], sections[1::2], strict=True):
        if title == "Args":
            yield ""
            yield from (f"- {_argument(entry)}" for entry in re.split(r"\n(?=    \S)", content.strip("\n")) if entry)
        elif title == "Returns":
            yield ""
            yield f"Returns: {_flow(content)}"


def _argument(entry: str) -> str:
    names, _, text = entry.strip().partition(":")
    return f"`{names}`: {_flow(text)}"


if __name__ == "__main__":
    missing = [name for name in BACKENDS if name not in tables()]
    if missing:
        sys.exit(f"not installed: {', '.join(missing)}")
    PAGE.write_text(render(tables()), encoding="utf-8")
