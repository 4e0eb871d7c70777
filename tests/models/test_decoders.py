"""Each decoder against transformers, which reads the same folder: logits of a prompt in chunks and of single steps."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.small_models import KINDS, make_folder

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("opweave_cpu")
models = pytest.importorskip("opweave_models")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(kind):
        if kind not in made:
            path = tmp_path_factory.mktemp(kind)
            made[kind] = path, make_folder(kind, path)
        return made[kind]

    return folder


def distance(ours, theirs):
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def expected(reference, ids):
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0].float().numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(folders, kind):
    path, reference = folders(kind)
    ids = np.random.default_rng(1).integers(3, 300, 90).tolist()
    truth = expected(reference, ids)
    with models.load(path, "cpu", kv="f32", precision="exact", context=128) as llm, llm.session() as session:
        session.feed(ids[:37])
        assert distance(session.logits(), truth[36]) < 1e-5
        for at in range(37, 40):
            session.feed([ids[at]])
            assert distance(session.logits(), truth[at]) < 1e-5
        session.feed(ids[40:])
        assert distance(session.logits(), truth[-1]) < 1e-5


def test_contexts_beyond_training_have_the_long_factors(folders):
    path, reference = folders("phi3-long")
    ids = np.random.default_rng(2).integers(3, 300, 200).tolist()
    truth = expected(reference, ids)
    with models.load(path, "cpu", kv="f32", precision="exact", context=256) as llm, llm.session() as session:
        session.feed(ids)
        assert distance(session.logits(), truth[-1]) < 1e-5
