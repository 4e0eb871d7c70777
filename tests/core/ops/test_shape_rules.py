"""Shape rules by themselves: a node that is made without its builder, as from a saved graph, is checked as well."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import opweave as ow
from opweave.errors import OpweaveError
from opweave.graph.opdef import find_op
from opweave.graph.tensor import node
from opweave_conformance import CASES
from opweave_conformance.trial import the_node

DERIVED = {"interpolate", "rope"}
"""Their builders make attributes from the lengths of axes; those of other lengths are as good."""


@pytest.mark.parametrize("op", sorted({case.op for case in CASES} - {"custom"} - DERIVED))
def test_shape_rules_refuse_what_builders_refuse(op):
    """Kernels read and write what attributes and shapes say: what does not go together must not reach them."""
    rng, tried = random.Random(0), 0
    for case in CASES:
        plain = all(o.layout == "contiguous" for o in case.operands)
        if case.op != op or not case.operands or not plain or "-with-" in case.id:
            continue
        made = the_node(case.build(*case.tensors()))
        if any(source.op is not None for source in made.srcs):
            continue
        for _ in range(12):
            shapes = [tuple([rng.choice([n, n, n, 1, 2, n + 1, 0]) for n in o.shape]) for o in case.operands]
            sized = [o._replace(shape=shape) for o, shape in zip(case.operands, shapes, strict=True)]
            try:
                tensors = {f"x{i}": operand.tensor(f"x{i}") for i, operand in enumerate(sized)}
            except OpweaveError:
                continue
            if _refused(case.build, *tensors.values()):
                sources = tuple([tensors[source.name] for source in made.srcs])
                assert _refused(node, made.op, sources, made.attrs), (
                    f"{case.id} with {shapes}: only the builder refuses"
                )
        tried += 1
        if tried == 40:
            break


def _refused(make: Callable[..., ow.Tensor], *args: Any) -> bool:
    try:
        make(*args)
    except OpweaveError:
        return True
    return False


@pytest.mark.parametrize("shifts", [(3, 0), (0, 1), (-1, 0), (1,), (1, 0, 0)])
def test_roll_takes_one_shift_within_each_axis(shifts):
    x = ow.input("x", (2, 1))
    assert node(find_op("roll"), (x,), {"shifts": (1, 0)}).shape == (2, 1)
    with pytest.raises(ow.ShapeError, match=r"one number 0 \.\. n - 1 for each axis"):
        node(find_op("roll"), (x,), {"shifts": shifts})


@pytest.mark.parametrize(("shape", "mode"), [((1, 1), "reflect"), ((1, 5), "wrap"), ((0, 5), "edge")])
def test_pad_takes_no_wider_frame_than_there_are_elements_for(shape, mode):
    x = ow.input("x", shape)
    with pytest.raises(ow.ShapeError, match="has elements for a frame of"):
        node(find_op("pad"), (x,), {"widths": ((2, 0), (0, 0)), "mode": mode, "value": 0.0})
