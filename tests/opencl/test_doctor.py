"""What ``opweave doctor`` says about OpenCL beside its devices."""

from __future__ import annotations

from opweave_opencl.hooks import opweave_doctor


def test_a_cache_that_cannot_be_written_is_slow(monkeypatch, tmp_path):
    monkeypatch.delenv("OCL_ICD_VENDORS", raising=False)
    monkeypatch.setenv("OPWEAVE_OPENCL_CACHE", str(tmp_path / "cache"))
    (found,) = opweave_doctor(devices=[])
    assert (found.status, found.message) == ("ok", f"kept in {tmp_path / 'cache'}, at most 256 MiB")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPWEAVE_OPENCL_CACHE", str(tmp_path / "file"))
    (found,) = opweave_doctor(devices=[])
    assert found.status == "slow"
    assert "OPWEAVE_OPENCL_CACHE" in found.remedy


def test_a_folder_of_drivers_that_leaves_none_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("OPWEAVE_OPENCL_CACHE", str(tmp_path))
    monkeypatch.setenv("OCL_ICD_VENDORS", "/nowhere")
    _, none = opweave_doctor(devices=[])
    assert (none.status, none.remedy) == ("slow", "unset OCL_ICD_VENDORS")
    _, some = opweave_doctor(devices=[object()])  # type: ignore[list-item]
    assert (some.status, some.remedy) == ("ok", "")
