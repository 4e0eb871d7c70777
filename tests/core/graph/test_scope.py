"""Scopes: how nodes are named within them."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import opweave as ow


def test_scopes_nest_and_come_before_names():
    x = ow.input("scoped", (2, 3))
    with ow.scope("encoder"):
        a = ow.exp(x)
        with ow.scope("layer3"):
            b = ow.tanh(a).named("out")
        with ow.scope("layer4/mlp"):
            c = ow.sin(a)
    d = ow.cos(a)
    assert [t.name for t in (a, b, c, d)] == ["encoder/exp", "encoder/layer3/out", "encoder/layer4/mlp/sin", "cos"]
    assert [t.scope for t in (a, b, c, d)] == ["encoder", "encoder/layer3", "encoder/layer4/mlp", ""]
    assert repr(b) == "<Tensor tanh 'encoder/layer3/out' f32[2, 3]>"
    assert "exp 'encoder/exp' f32[2, 3] (built at" in a.describe()
    assert a.T.name == "transpose"


def test_leaves_keep_the_names_by_which_they_are_fed():
    # Names of its own: equal leaves are one tensor, which another test may have named.
    with ow.scope("layer"):
        leaves = (
            ow.input("fed", (2,)),
            ow.state("sum", (2,)),
            ow.constant([1.0, 2.0]),
            ow.weights({"w": np.ones(2)})["w"],
        )
        total = sum(leaves[1:], leaves[0] * 1.5)
    assert [t.name for t in leaves] == ["fed", "sum", "constant", "w"]
    assert {t.scope for t in leaves} == {""}
    assert total.name == "layer/add"
    np.testing.assert_array_equal(ow.compile(total, devices=["cpu"])(fed=np.ones(2, np.float32)), [3.5, 4.5])


def test_an_equal_node_keeps_the_scope_in_which_it_was_built_first():
    x = ow.input("scoped", (7,))
    with ow.scope("first"):
        node = ow.exp(x)
    with ow.scope("second"):
        assert ow.exp(x) is node
    assert node.name == "first/exp"


def test_a_scope_is_left_by_errors_and_decorates_functions():
    x = ow.input("scoped", (8,))
    with pytest.raises(ZeroDivisionError), ow.scope("failing"):
        raise ZeroDivisionError

    @ow.scope("block")
    def block(t):
        return ow.tanh(t)

    assert block(block(x)).name == "block/tanh"
    assert ow.cos(x).name == "cos"


def test_threads_and_tasks_have_their_own():
    x = ow.input("scoped", (9,))

    async def build(name, factor):
        with ow.scope(name):
            await asyncio.sleep(0.001)
            return (x * factor).name

    async def both():
        with ow.scope("model"):
            return await asyncio.gather(build("a", 1.25), build("b", 1.375))

    assert asyncio.run(both()) == ["model/a/scale", "model/b/scale"]
    with ow.scope("here"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: (x * 7.5).name).result() == "scale"


@pytest.mark.parametrize("name", ["", "a//b", "/a", "a/", None, 3])
def test_a_scope_needs_a_name(name):
    with pytest.raises(ow.ShapeError, match="a scope needs a name"), ow.scope(name):
        pass
