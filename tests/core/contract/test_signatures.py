"""The signatures of the contract are those of a recorded file, so that a change of them is seen in review.

After a change that is meant, ``python tests/core/contract/test_signatures.py`` writes the file anew. What an author of
a backend has to do about it belongs into a fragment in ``news/`` and, where a backend has to follow, into
`opweave.contract.version` (`docs/compatibility.md`).
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opweave import contract
from opweave.contract.device import DeviceHooks
from opweave.contract.kernels import KernelTable
from opweave.contract.memory import BufferTypeHooks
from opweave.contract.stream import StreamHooks

FILE = Path(__file__).parents[1] / "contract_signatures.txt"
HOOKS = {
    kind: {n for n, member in vars(kind).items() if n.startswith("_") and not n.startswith("__") and callable(member)}
    for kind in (DeviceHooks, StreamHooks, BufferTypeHooks)
}


def render() -> str:
    names = {name: getattr(contract, name) for name in contract.__all__} | {"KernelTable": KernelTable}
    blocks = ["\n".join(lines_of(name, names[name])) for name in sorted(names)]
    return "\n\n".join(blocks) + "\n"


def lines_of(name: str, value: Any) -> list[str]:
    if not isinstance(value, type):
        return [name + signature(value) if inspect.isfunction(value) else f"{name} = {shown(value)}"]
    if issubclass(value, enum.Enum):
        return [f"class {name}(Enum)", *(f"    {member.name} = {member.value!r}" for member in value)]
    if issubclass(value, tuple) and (names := getattr(value, "_fields", ())):
        defaults: dict[str, Any] = getattr(value, "_field_defaults", {})
        fields = [
            f"    {field}: {written(value.__annotations__[field])}"
            + (f" = {shown(defaults[field])}" if field in defaults else "")
            for field in names
        ]
        return [f"class {name}(NamedTuple)", *fields, *methods(value, set(names))]
    return [f"class {name}", *methods(value, set())]


def methods(cls: type, known: set[str]) -> Iterator[str]:
    """The members that authors call or override, those of base classes too, each once, in the order of names."""
    members: dict[str, tuple[type, Any]] = {}
    declared: dict[str, str] = {}
    for kind in reversed([kind for kind in cls.__mro__ if kind.__module__.startswith("opweave.")]):
        members |= {name: (kind, member) for name, member in vars(kind).items()}
        declared |= {name: str(text) for name, text in vars(kind).get("__annotations__", {}).items()}
    hooks = set().union(*(names for kind, names in HOOKS.items() if issubclass(cls, kind)))
    for name in sorted({*members, *declared} - known):
        if name.startswith("_") and name not in hooks and (name != "__init__" or is_protocol(cls)):
            continue
        kind, member = members.get(name, (cls, inspect.Parameter.empty))
        yield "    " + member_line(name, kind, member, declared.get(name, ""))


def member_line(name: str, kind: type, member: Any, annotation: str) -> str:
    if isinstance(member, property):
        return f"{name} -> {member.fget.__annotations__.get('return', '?')}  [property]"
    if isinstance(member, classmethod | staticmethod):
        return f"{name}{signature(member.__func__)}  [{type(member).__name__}]"
    if hasattr(member, "func") and hasattr(member, "attrname"):
        return f"{name} -> {member.func.__annotations__.get('return', '?')}  [property]"
    if inspect.isfunction(member):
        return name + signature(member)
    text = f"{name}: {annotation}" if annotation else name
    without = member is inspect.Parameter.empty or inspect.ismemberdescriptor(member)
    # What is counted in a class differs from process to process, such as `Limit.version`.
    return text if without or annotation.startswith("ClassVar[int]") else f"{text} = {shown(member)}"


def signature(function: Any) -> str:
    """Parameters and result as they are written in the source."""
    plain = inspect.signature(function)
    parts: list[str] = []
    for parameter in plain.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in "".join(part[:1] for part in parts):
            parts.append("*")
        stars = "*" * (parameter.kind is parameter.VAR_POSITIONAL) or "**" * (parameter.kind is parameter.VAR_KEYWORD)
        text = stars + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {parameter.annotation}"
        if parameter.default is not parameter.empty:
            text += f" = {shown(parameter.default)}"
        parts.append(text)
    result = "" if plain.return_annotation is plain.empty else f" -> {plain.return_annotation}"
    return f"({', '.join(parts)}){result}"


def written(annotation: Any) -> str:
    """An annotation as it is written in the source."""
    return str(getattr(annotation, "__forward_arg__", annotation))


def is_protocol(cls: type) -> bool:
    return bool(vars(cls).get("_is_protocol"))


def shown(value: Any) -> str:
    """A value without what differs from process to process."""
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, frozenset):
        return "{" + ", ".join(sorted(map(repr, value))) + "}"
    return f"<{type(value).__name__}>" if " at 0x" in repr(value) else repr(value)


def test_the_signatures_of_the_contract_are_those_that_were_recorded():
    recorded = FILE.read_text(encoding="utf-8")
    assert render() == recorded, "if the change is meant: python tests/core/contract/test_signatures.py"


def test_every_hook_is_recorded_with_its_parameters():
    recorded = FILE.read_text(encoding="utf-8")
    hooks = set().union(*HOOKS.values())
    assert len(hooks) > 40
    for hook in hooks:
        assert f"\n    {hook}(self" in recorded, hook


def test_a_changed_default_or_annotation_is_seen():
    def before(a: int, *rest: str, key: bool = False) -> None: ...
    def after(a: int, *rest: str, key: bool = True) -> None: ...
    def other(a: float, *rest: str, key: bool = False) -> None: ...

    assert signature(before) == "(a: int, *rest: str, key: bool = False) -> None"
    assert len({signature(before), signature(after), signature(other)}) == 3


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
