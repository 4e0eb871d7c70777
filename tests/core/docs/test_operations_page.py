"""``docs/operations.md`` agrees with the definitions of the operations."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from opweave import ops
from opweave.contract.kernels import KernelTable
from opweave.graph.opdef import OPS
from tests.support.scripts import load_script

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "operations.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return load_script("docs/generate_operations.py")


def test_the_page_is_up_to_date(generator: ModuleType):
    tables = generator.tables()
    made = generator.render(tables)
    assert generator.without_support(made) == generator.without_support(PAGE), "run python docs/generate_operations.py"
    if set(tables) >= generator.listed(PAGE):
        listed = {name: table for name, table in tables.items() if name in generator.listed(PAGE)}
        assert generator.render(listed) == PAGE, "run python docs/generate_operations.py"


def test_links_lead_to_files():
    links = re.findall(r"\]\((\.\./[^)]+)\)", PAGE)
    assert len(links) > len(OPS)
    assert [link for link in dict.fromkeys(links) if not (DOCS / link).is_file()] == []


def test_every_operation_leads_to_its_definition_and_its_kernels():
    pages = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##)", PAGE + "\n##", re.MULTILINE | re.DOTALL))
    for name, op in OPS.items():
        if op.family == "third-party":
            continue
        assert f"(../core/src/opweave/ops/{op.family}.py)" in pages[name], name
        if not op.is_view:
            assert f"(../plugins/cpu/src/opweave_cpu/kernels/{op.family}.py)" in pages[name], name
            assert "Example: " in pages[name], name


def test_every_operation_and_every_builder_has_its_place():
    headings = {line.removeprefix("### ") for line in PAGE.splitlines() if line.startswith("### ")}
    assert headings == set(vars(ops)["__all__"]) | {name for name, op in OPS.items() if op.family != "third-party"}


@pytest.mark.parametrize(
    "says",
    [
        "`ow.pad(x, widths, mode='constant', value=0)`",
        "Formula: `y[i, ...] = table[ids[i], ...]`.",
        "Formula: `a + b`. May overwrite source 0 or source 1. Element by element.",
        "Formula: `region += value`. Writes its first source, a state.",
        "Made of other operations; runs wherever those run.",
    ],
)
def test_the_page_shows_signatures_formulas_and_facts(says: str):
    assert says in PAGE.splitlines()


def unused(*args: object, **attrs: object) -> Callable[[], None]:
    raise AssertionError("pages run no kernels")


def test_support_is_what_the_kernel_tables_hold(generator: ModuleType):
    table = KernelTable("f32", "dense")
    table("exp", dtypes="f32 f16", inplace=True)(unused)
    table("copy", dtypes="f32", layout="strided")(unused)
    page = generator.render({"cpu": table}).splitlines()
    assert page[page.index("### exp") :].index("- cpu: f32 f16 (packed operands), in place") < 10
    assert page[page.index("### copy") :].index("- cpu: f32 (any strides)") < 10
    assert page[page.index("### add") :].index("- cpu: no kernel") < 15
