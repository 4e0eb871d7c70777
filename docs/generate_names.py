"""Writes ``docs/names.md``: the public names of `opweave` by group, each with the first sentence of its docstring; and
``docs/reference``: a page for each group, and for each part of the contract, which the site fills with the whole
docstrings.

Run it after a public name was added or its docstring changed: ``python docs/generate_names.py``.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, Final

import opweave
from opweave import contract
from opweave.contract.device import DeviceHooks
from opweave.contract.kernels import KernelTable
from opweave.contract.memory import BufferTypeHooks
from opweave.contract.stream import StreamHooks
from opweave.names import GROUPS

PAGE: Final = Path(__file__).with_name("names.md")
REFERENCE: Final = PAGE.with_name("reference")
AUTHORS: Final = "For authors of backends"
CONSTANTS: Final = {"DTYPES": "opweave.graph.dtypes.DTYPES"}
HOOKS: Final = {
    "Backend": contract.Backend,
    "Device": DeviceHooks,
    "Stream": StreamHooks,
    "BufferType": BufferTypeHooks,
}
PARTS: Final = {
    "Devices": "Backend Caps DeviceProps Device Features Kind Offloading SetThreads check_threads flops",
    "Memory": "Buffer BufferType MemorySpace MultiBuffer Usage flat_rows mapped",
    "Kernels": "KernelTable Arg Limit Limits Single Step Tunable",
    "Streams": "Event Group Plan StepError Stream Structure WorkerStream first_equals pointwise_groups structure_of",
    "Collectives": "CollectiveSupport Collectives",
}
"""Part of the contract -> what its page shows."""

HEAD: Final = """\
# Names

<!-- Written by docs/generate_names.py: change the docstrings, not this page. -->

What `import opweave as ow` gives, by what it is for. The operations have [a page of their own](operations.md). Whole
docstrings, with shapes, types and errors, are shown by `help(ow.Scheduler)` and the like, and on the pages of the
groups on the site; how things work together is in the [guide](guide/index.md).
"""


def first_sentence(value: Any) -> str:
    """The first sentence of a docstring on one line; of a table, what it has."""
    if isinstance(value, dict):
        return f"Name -> `{type(next(iter(value.values()))).__name__}`, {len(value)} of them."
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    end = re.search(r"\.( (?=[A-Z])|$)", text)
    return (text[: end.start()] if end else text.rstrip(":")) + "."


def cell(value: Any) -> str:
    """The first sentence of a docstring in a table of Markdown."""
    return first_sentence(value).replace("``", "`").replace("|", "\\|")


def render() -> str:
    """The whole page."""
    lines = [HEAD]
    for group, names in GROUPS.items():
        lines += [f"## {group}", "", f"[Whole docstrings](reference/{slug(group)}.md)", ""]
        lines += ["| name | what it is |", "| --- | --- |"]
        for name in names:
            lines.append(f"| `ow.{name}` | {cell(getattr(opweave, name))} |")
        lines.append("")
    return "\n".join(lines)


def slug(group: str) -> str:
    """The name of a group's page."""
    return "contract" if group == AUTHORS else group.lower().replace(",", "").replace(" ", "-")


def reference() -> dict[str, str]:
    """Name of a page -> the page, on which the site puts the docstrings."""
    pages = {}
    for group, names in GROUPS.items():
        if group == AUTHORS:
            continue
        lines = [f"# {group}", ""]
        for name in names:
            value = getattr(opweave, name)
            path = CONSTANTS.get(name) or f"{value.__module__}.{value.__qualname__}"
            lines += [*entry(path, f"ow.{name}", *(["members: false"] if name == "Registry" else [])), ""]
        pages[slug(group)] = "\n".join(lines)
    return pages | contract_pages()


def contract_pages() -> dict[str, str]:
    """What an author of a backend reads: a page with the table of all hooks, and a page for each part."""
    lines = [
        "# The contract",
        "",
        "What an author of a backend implements, and what the core guarantees: `opweave.contract`. Read",
        "[Write a backend](../backend/index.md) first. Hooks begin with an underscore; all but `_alloc`, `_upload` and",
        "`_download` are optional.",
        "",
    ]
    shown = {name: part for part, names in PARTS.items() for name in names.split()}
    values = {name: getattr(contract, name) for name in contract.__all__}
    public = {name for name, value in values.items() if inspect.isclass(value) or inspect.isfunction(value)}
    assert shown.keys() == public | {"KernelTable"}, f"PARTS and opweave.contract differ: {shown.keys() ^ public}"
    for name, hooks in HOOKS.items():
        link = f"contract-{shown[name].lower()}.md#{hooks.__module__}.{hooks.__qualname__}"
        lines += [f"## {name}: its hooks", "", "| hook | what it does |", "| --- | --- |"]
        for hook, method in vars(hooks).items():
            method = getattr(method, "__func__", method)
            is_hook = hook[:2] != "__" and (hook[:1] == "_" or name == "Backend")
            if is_hook and inspect.isfunction(method) and method.__doc__:
                lines.append(f"| [`{hook}`]({link}.{hook}) | {cell(method)} |")
        lines.append("")
    lines += ["## What there is", "", "| name | what it is |", "| --- | --- |"]
    for name, part in shown.items():
        value = KernelTable if name == "KernelTable" else getattr(contract, name)
        link = f"contract-{part.lower()}.md#{value.__module__}.{value.__qualname__}"
        lines.append(f"| [`{name}`]({link}) | {cell(value)} |")
    pages = {"contract": "\n".join([*lines, ""])}
    for part, names in PARTS.items():
        lines = [f"# Contract: {part.lower()}", ""]
        for name in names.split():
            value = KernelTable if name == "KernelTable" else getattr(contract, name)
            if name in HOOKS:
                hooks, heading = HOOKS[name], name if name == "Backend" else f"{name}: its hooks"
                lines += [*entry(f"{hooks.__module__}.{hooks.__qualname__}", heading, 'filters: ["!^__"]'), ""]
            if value is not HOOKS.get(name):
                options = ['filters: ["!^_(?!_call__)"]'] if value is KernelTable else []
                heading = f"{name}: what it has" if name in HOOKS else name
                lines += [*entry(f"{value.__module__}.{value.__qualname__}", heading, *options), ""]
        pages[f"contract-{part.lower()}"] = "\n".join(lines)
    return pages


def entry(path: str, heading: str, *options: str) -> list[str]:
    return [
        f"::: {path}",
        "    options:",
        *(f"      {option}" for option in (f'heading: "{heading}"', f'toc_label: "{heading}"', *options)),
    ]


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    REFERENCE.mkdir(exist_ok=True)
    for name, text in reference().items():
        (REFERENCE / f"{name}.md").write_text(text, encoding="utf-8")
