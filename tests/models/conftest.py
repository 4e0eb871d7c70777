"""What tests of models share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A small Llama as Hugging Face lays it out; it is only read."""
    from tests.support.small_models import make_folder

    path = tmp_path_factory.mktemp("llama")
    make_folder("llama", path)
    return path
