"""Files that are damaged, dangerous or not supported: typed errors that name the place, before anything is built."""

from __future__ import annotations

import os
import random
import tracemalloc

import numpy as np
import pytest
from onnx import TensorProto, external_data_helper, helper

import opweave as ow
import opweave_onnx
from opweave_onnx.reading import read_model
from tests.support.onnx_models import mlp, model, node, value

F32 = np.float32
X = value("x", F32, [2, 3])


def refused(proto, match, error=ow.FormatError):
    with pytest.raises(error, match=match):
        opweave_onnx.load(proto, ["host"])


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "is empty"),
        (b"GGUF" + bytes(40), "no ONNX model"),
        (b"\x08\x0a", "has no graph"),
        (b"\x3a\xff\x01", "cut off"),
    ],
)
def test_what_is_no_model(data, match, tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    for source in (data, path, str(path)):
        refused(source, match)


def test_a_missing_file_is_named(tmp_path):
    refused(tmp_path / "nothing.onnx", r"nothing\.onnx cannot be read: No such file")


def test_a_file_that_is_cut_off():
    data = mlp(np.random.default_rng(0)).SerializeToString()
    for n in (1, 10, len(data) // 2, len(data) - 1):
        refused(data[:n], "no ONNX model|takes|has no graph|nothing|elements")


def test_cycles_and_names():
    refused(model([node("Relu", "b", "a"), node("Relu", "a", "b")], [X], ["b"]), r"node 'relu_a'.*'b'.*has a cycle")
    refused(model([node("Relu", "z", "a")], [X], ["a"]), r"node 'relu_a' \(Relu\) reads 'z', which is nowhere defined")
    refused(model([node("Relu", "x", "a"), node("Neg", "x", "a")], [X], ["a"]), r"'neg_a' .*computes 'a'.* before")
    refused(model([node("Relu", "x", "a")], [X], ["q"]), r"nothing computes the output 'q'")
    refused(model([node("Relu", "x", "a")], [X, X], ["a"]), "two inputs")


def test_operators_that_are_not_known_are_listed_with_their_nodes():
    refused(model([node("Foo", "x", "a"), node("Relu", "a", "b")], [X], ["b"]), r"Foo \(foo_a\)", ow.UnsupportedOpError)
    proto = model([helper.make_node("Relu", ["x"], ["a"], domain="acme", name="n")], [X], ["a"])
    refused(proto, "'acme', of which the model imports nothing")
    proto.opset_import.append(helper.make_opsetid("acme", 1))
    refused(proto, r"acme\.Relu \(n\)", ow.UnsupportedOpError)
    proto = model([node("Relu", "x", "a")], [X], ["a"])
    proto.opset_import[0].version = 999
    refused(proto, "imports version 999")


@pytest.mark.parametrize(
    ("dims", "raw", "match"),
    [([2, 3], 23, "takes 24 bytes, not 23"), ([-1], 4, "no memory holds"), ([1 << 40, 1 << 40], 4, "no memory holds"),
     ([1 << 33], 8, "takes 34,359,738,368 bytes, not 8")],
)  # fmt: skip
def test_initializers_whose_dims_lie(dims, raw, match):
    proto = model([node("Add", "x w", "y")], [X], ["y"])
    proto.graph.initializer.append(TensorProto(name="w", dims=dims, data_type=1, raw_data=bytes(raw)))
    tracemalloc.start()
    refused(proto, f"initializer 'w'.*{match}")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def external(tmp_path, location, **more):
    proto = model([node("Add", "x w", "y")], [X], ["y"], {"w": np.arange(6, dtype=F32).reshape(2, 3)})
    w = proto.graph.initializer[0]
    data = w.raw_data
    external_data_helper.set_external_data(w, location, **more)
    w.ClearField("raw_data")
    path = tmp_path / "folder" / "m.onnx"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(proto.SerializeToString())
    (tmp_path / "outside.bin").write_bytes(data)
    (path.parent / "inside.bin").write_bytes(bytes(64) + data)
    return path


def test_external_data_is_mapped(tmp_path):
    path = external(tmp_path, "inside.bin", offset=64, length=24)
    array = read_model(path).graph.initializers["w"]
    assert not array.flags.owndata
    assert not array.flags.writeable
    with opweave_onnx.load(path, ["cpu"]) as loaded:
        np.testing.assert_array_equal(loaded(x=np.ones((2, 3), F32)), np.arange(1, 7, dtype=F32).reshape(2, 3))


@pytest.mark.parametrize("location", ["../outside.bin", "/etc/passwd", "link", "", ".", "a\0b"])
def test_external_data_outside_of_the_folder_is_refused(tmp_path, location):
    path = external(tmp_path, location)
    os.symlink(tmp_path / "outside.bin", path.parent / "link")
    refused(path, "outside of the model's folder; it is not read")


def test_external_data_that_is_not_there(tmp_path):
    refused(external(tmp_path, "missing.bin"), "'missing.bin', which is not in the model's folder")
    refused(external(tmp_path, "inside.bin", offset=80, length=24), "24 bytes from 80 are beyond the end")
    refused(external(tmp_path, "inside.bin", offset=0, length=20), "takes 24 bytes, not 20")
    refused(external(tmp_path, "inside.bin").read_bytes(), "the model was not loaded from a file")


def test_functions_that_call_each_other():
    a = helper.make_function(
        "f", "a", ["x"], ["y"], [helper.make_node("b", ["x"], ["y"], domain="f")], [helper.make_opsetid("f", 1)]
    )
    b = helper.make_function(
        "f", "b", ["x"], ["y"], [helper.make_node("a", ["x"], ["y"], domain="f")], [helper.make_opsetid("f", 1)]
    )
    proto = model([helper.make_node("a", ["x"], ["y"], domain="f")], [X], ["y"], functions=[a, b])
    proto.opset_import.append(helper.make_opsetid("f", 1))
    refused(proto, "the functions a, b call each other in a circle")


def test_versions_of_the_format_and_of_operator_sets():
    proto = model([node("Relu", "x", "a")], [X], ["a"])
    for version in (0, 99):
        proto.ir_version = version
        refused(proto, f"is of version {version} of the format; this package of onnx knows 1 to")
    proto.ir_version = 2
    del proto.opset_import[:]
    with opweave_onnx.load(proto, ["host"]) as loaded:  # before version 3 of the format: version 1 of the operators
        assert loaded.source.versions == {"": 1}
        np.testing.assert_array_equal(loaded(x=np.full((2, 3), -1, F32)), np.zeros((2, 3)))
    proto.ir_version = 3
    refused(proto, "imports no operators")
    proto.opset_import.extend([helper.make_opsetid("", 7), helper.make_opsetid("ai.onnx", 8)])
    refused(proto, r"imports the versions 7 and 8 of ai\.onnx")


def test_functions_of_one_name():
    made = [helper.make_function("f", "a", ["x"], ["y"], [node(op, "x", "y")], [helper.make_opsetid("", 21)])
            for op in ("Relu", "Neg")]  # fmt: skip
    call = helper.make_node("a", ["x"], ["y"], domain="f")
    proto = model([call], [X], ["y"], functions=made)
    proto.opset_import.append(helper.make_opsetid("f", 1))
    refused(proto, "two functions 'a'")
    proto.functions[1].overload = "second"
    refused(proto, "has overloads of the function 'a'", ow.UnsupportedOpError)
    del proto.functions[1]
    proto.functions[0].node[0].attribute.append(helper.make_attribute("alpha", 1.0))
    refused(proto, r"function 'a': node 'relu_y' \(Relu\): Relu in version 21 of ai.onnx has no attribute 'alpha'")
    del proto.functions[0].node[0].attribute[:]
    del proto.functions[0].opset_import[:]
    refused(proto, r"function 'a': node 'relu_y' \(Relu\) is of domain 'ai.onnx', of which nothing is imported")


def test_mutated_files_raise_typed_errors_or_run():
    """Some thousand files with changed bytes: no other error, no crash, no memory beyond a few times the file."""
    rng = random.Random(0)
    seeds = [
        mlp(np.random.default_rng(1)).SerializeToString(),
        model(
            [node("Shape", "x", "s"), node("Reshape", "x s", "r"), node("Conv", "r w", "c", pads=[1, 1]),
             node("Slice", "c a b", "y")],
            [value("x", F32, [1, 2, 5])], ["y"],
            {"w": np.ones((2, 2, 3), F32), "a": np.array([0]), "b": np.array([1])},
        ).SerializeToString(),
    ]  # fmt: skip
    count = int(os.environ.get("OPWEAVE_ONNX_FUZZ", "600"))
    ran = 0
    for i in range(count):
        data = bytearray(seeds[i % 2])
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        try:
            with opweave_onnx.load(bytes(data), ["host"]) as loaded:
                feeds = loaded.examples()
                if sum(a.nbytes for a in feeds.values()) < 1 << 20:
                    loaded.run(feeds)
                    ran += 1
        except (ow.OpweaveError, MemoryError):
            pass
    assert ran > count // 10
