"""ONNX's own tests of backends: what passes, what is refused, and that nothing is wrong."""

from __future__ import annotations

import pytest

from opweave_onnx.conformance.scoreboard import cases, run_cases, summary

LEFT_OUT = (
    "adagrad", "adam", "momentum", "nesterov", "ai_onnx_ml", "image_decoder", "regex", "string", "strnorm", "tfidf",
    "gradient_of", "equal_string", "cast_STRING", "cast_FLOAT_to_STRING", "castlike_STRING", "FLOAT_to_STRING",
)  # fmt: skip
"""Training, classical machine learning, texts and files of pictures: parts of their names."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "least"), [("node", 1831), ("simple", 15), ("pytorch-operator", 35), ("pytorch-converted", 82)]
)
def test_onnx_tests_on_the_cpu(kind, least):
    results = run_cases(cases(kind), ["cpu", "host"])
    wrong = [(r.case.name, r.why) for r in results if r.state == "wrong"]
    assert not wrong
    assert summary(results)["passed"] >= least
    refused = [r.case.name for r in results if r.state == "refused"]
    assert [name for name in refused if not any(part in name for part in LEFT_OUT)] == []
    assert all(r.why for r in results if r.state == "refused")
