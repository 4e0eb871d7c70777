"""`pip_install`: where packages of the project come from."""

from __future__ import annotations

import json
from importlib import metadata

import pytest

from opweave import packages
from opweave.packages import pip_install


@pytest.fixture
def installed_from(monkeypatch):
    """``installed_from(url)`` has pip's note about ``opweave`` say so; ``None``: there is no note, as from an index."""

    def install(url: str | None) -> None:
        class Distribution:
            def read_text(self, name: str) -> str | None:
                assert name == "direct_url.json"
                return None if url is None else json.dumps({"url": url, "dir_info": {}})

        monkeypatch.setattr(metadata, "distribution", lambda name: Distribution())
        packages._origin.cache_clear()

    yield install
    packages._origin.cache_clear()


def test_from_an_index(installed_from, tmp_path):
    for url in (None, "https://example.org/opweave-0.1.0-py3-none-any.whl", (tmp_path / "gone").as_uri()):
        installed_from(url)
        assert pip_install("opweave-cpu", "opweave-opencl[pocl]") == "pip install opweave-cpu 'opweave-opencl[pocl]'"


def test_from_a_clone(installed_from, tmp_path):
    clone = tmp_path / "a clone"
    for folder in ("core", "plugins/cpu", "frontends/onnx", "models"):
        (clone / folder).mkdir(parents=True)
        (clone / folder / "pyproject.toml").write_text("")
    installed_from((clone / "core").as_uri())
    assert pip_install("opweave-cpu[jit]") == f"pip install '{clone}/plugins/cpu[jit]'"
    assert pip_install("opweave-onnx", "opweave-models") == f"pip install '{clone}/frontends/onnx' '{clone}/models'"
    assert pip_install("opweave[training]") == f"pip install '{clone}/core[training]'"
    assert pip_install("opweave-acme") == "pip install opweave-acme"


def test_from_a_folder_of_wheels(installed_from, tmp_path):
    wheel = tmp_path / "opweave-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"")
    installed_from(wheel.as_uri())
    assert pip_install("opweave-cpu") == f"pip install --find-links {tmp_path} opweave-cpu"


def test_not_installed(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    packages._origin.cache_clear()
    assert pip_install("opweave-cpu") == "pip install opweave-cpu"
    packages._origin.cache_clear()
