"""Writes ``docs/operations.md`` from the definitions of the operations and the tables of the backends' kernels.

Run it after an operation or a kernel was added: ``python docs/generate_operations.py``. What it says of a backend comes
from the package's kernels: those of our plugins that are installed are listed; no device is needed.
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
from opweave.contract.kernels import Kernel, KernelTable
from opweave.graph.dtypes import DTYPES, DType
from opweave.graph.opdef import OPS, OpDef
from opweave.graph.tensor import Tensor
from opweave_conformance import CASES, Case

PAGE: Final = Path(__file__).with_name("operations.md")
BACKENDS: Final = ("cpu", "opencl", "ort", "torch")

HEAD: Final = """\
# Operations

<!-- Written by docs/generate_operations.py: change the definitions, not this page. -->

Every operation, by family. A family is one file of definitions, and as a rule one file of kernels in each backend,
under the same name: what is said below of an operation, and of each backend, links to them. A definition holds the
shape rule, the reference in NumPy that every kernel is compared with, the cost, and which sources the result may
overwrite.

Tensors are written as NumPy writes arrays; operands of binary operations broadcast and are promoted. *Element by
element* means that the result has the shape of the operands. Half types are computed in f32, and results are rounded.
Views are not computed by any device. Each operation has an example of its node: types and shapes of the sources,
attributes as kernels get them, type and shape of the result.

The `host` device runs the reference of every operation, for any dtype and layout; what the other backends have kernels
for is said with each. A kernel may ask for more than its types and layouts; `device.why_not(step)` gives the reason of
a refusal.
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


def listed(page: str) -> set[str]:
    """The backends of which the page speaks."""
    return {name for name in BACKENDS if re.search(rf"^- {name}: ", page, re.MULTILINE)}


def without_support(page: str) -> str:
    """The page without what it says of backends."""
    return "\n".join(line for line in page.splitlines() if not re.match(rf"- ({'|'.join(BACKENDS)}): ", line))


def _families() -> dict[str, list[str]]:
    """Family -> its operations as they are defined, then the functions that are made of others."""
    families: dict[str, list[str]] = {}
    for name, op in OPS.items():
        if op.family != "third-party":
            families.setdefault(op.family, []).append(name)
    for name in sorted(set(vars(ops)["__all__"]) - set(OPS)):
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
        yield "Made by the builders of other operations, which say when."
    yield ""
    if op is None:
        assert build is not None
        yield "Made of other operations; runs wherever those run."
        yield f"Defined in {_link(build.__module__)}."
        return
    facts = [*([f"Formula: `{op.formula}`"] if op.formula else []), *_facts(op)]
    yield from [". ".join(facts) + "."] if facts else []
    yield " ".join([f"Defined in {_link(f'opweave.ops.{op.family}')}.", *_example(op)])
    if not op.is_view:
        yield ""
        for backend, table in kernels.items():
            yield f"- {backend}: {_support(op, table)}{_places(op, table, backend)}"


def _facts(op: OpDef) -> Iterator[str]:
    if op.is_view:
        yield "A view"
    if op.writes:
        yield "Writes its first source, a state"
    if op.inplace:
        yield f"May overwrite {' or '.join(f'source {i}' for i in op.inplace)}"
    if op.pointwise:
        yield "Element by element"


def _example(op: OpDef) -> Iterator[str]:
    """A node of the operation, of the first case with the most axes."""
    cases = [case for case in CASES if case.op == op.name and all(o.layout == "contiguous" for o in case.operands)]
    if cases:
        node = _node_of(max(cases, key=_worth))
        sources = ", ".join(f"`{_type(src)}`" for src in node.srcs) or "nothing"
        attrs = ", ".join(f"`{name}={_value(value)}`" for name, value in node.attrs.items())
        yield f"Example: {sources}{f' with {attrs}' if attrs else ''} gives `{_type(node)}`."


def _worth(case: Case) -> tuple[int, bool]:
    """Many axes show more; lengths of thousands do not."""
    axes = max([len(o.shape) if max(o.shape, default=0) < 1000 else 0 for o in case.operands], default=0)
    return axes, any(o.dtype == "f32" for o in case.operands)


def _node_of(case: Case) -> Tensor:
    node = case.build(*case.tensors())
    while node.is_view:
        node = node.srcs[0]
    return node


def _type(x: Tensor) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _value(value: Any) -> str:
    return str(getattr(value, "__name__", repr(value)))


def _link(module: str) -> str:
    """The file of a module, as a link from the page."""
    package, _, rest = module.partition(".")
    plugin = package.removeprefix("opweave_")
    folder = "core" if package == "opweave" else f"plugins/{plugin}"
    return f"[{rest.replace('.', '/')}.py](../{folder}/src/{module.replace('.', '/')}.py)"


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


def _places(op: OpDef, table: KernelTable, backend: str) -> str:
    """Where the kernels are, as links."""
    factories = [kernel.factory for kernel in table.candidates(op.name)]
    modules = dict.fromkeys(f.__module__ for f in factories if f.__module__.startswith(f"opweave_{backend}."))
    return f"; in {', '.join(map(_link, modules))}" if modules else ""


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
    found = tables()
    PAGE.write_text(render(found), encoding="utf-8")
    print(f"{PAGE}: {', '.join(found)}" + "".join(f"; not installed: {name}" for name in BACKENDS if name not in found))
