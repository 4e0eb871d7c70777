"""``opweave doctor``, and unusual reports of devices in ``opweave devices``."""

from __future__ import annotations

import json

import pytest

from opweave.packages import pip_install
from opweave.runtime.host.cache import FileCache
from opweave.runtime.host.cores import Cores
from opweave.tools.doctor import cache_diagnosis, cores_diagnosis, threads_diagnosis
from tests.support.plugins_for_tests import OLD, backend, probed
from tests.support.text import words


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    monkeypatch.setenv("OPWEAVE_PROFILE_CACHE", str(tmp_path / "profiles"))


def diagnoses(out: str) -> dict[str, dict[str, str]]:
    return {d["about"]: d for d in json.loads(out)["diagnoses"]}


class TestDoctor:
    def test_plugins_and_devices_with_cause_and_remedy(self, folder, run, monkeypatch):
        folder.add("acme", probed("Unit()", OLD))
        folder.add("boom", "1 / 0")
        folder.add("cardless", backend(body="raise Unavailable('no card', remedy='buy one')"))
        folder.add("off")
        monkeypatch.setenv("OPWEAVE_PLUGIN_CHILD", "1")
        code, out, _ = run("doctor", "--json", OPWEAVE_DISABLE="off")
        assert "OPWEAVE_PLUGIN_CHILD" not in out, "nobody but the command has set it"
        found = diagnoses(out)
        assert code == 1
        assert (found["plugin acme"]["status"], found["plugin acme"]["message"]) == ("ok", "1.0: acme:0")
        assert found["device acme:1"] == {
            "by": "opweave", "about": "device acme:1", "status": "wrong",
            "message": "unusable (Old card): no kernel image for sm_30", "remedy": "install the build for it",
        }  # fmt: skip
        assert found["plugin boom"]["status"] == "wrong"
        assert "ZeroDivisionError" in found["plugin boom"]["message"]
        assert (found["plugin cardless"]["status"], found["plugin cardless"]["remedy"]) == ("slow", "buy one")
        assert found["plugin off"]["status"] == "ok"
        code, out, _ = run("doctor", OPWEAVE_DISABLE="off")
        assert code == 1
        assert words("remedy install the build for it") in words(out)
        assert "2 wrong" in out

    def test_a_driver_that_another_one_replaces_is_a_remark(self, folder, run):
        """Two drivers show one piece of hardware."""
        folder.add("acme", probed("Unit(kind=Kind.GPU, hardware_id='7')", "Unit(kind=Kind.CPU, hardware_id='7')"))
        code, out, _ = run("doctor", "--json")
        found = diagnoses(out)["device acme:0"]
        assert (code, found["status"], found["remedy"]) == (0, "ok", "install the build for it")
        assert found["message"] == "acme:1 is used in place of this one, which is unusable: no kernel image for sm_30"

    def test_a_driver_of_other_hardware_replaces_none(self, folder, run):
        folder.add("acme", probed("Unit(kind=Kind.GPU, hardware_id='7')", "Unit(kind=Kind.CPU)"))
        code, out, _ = run("doctor", "--json")
        assert (code, diagnoses(out)["device acme:0"]["status"]) == (1, "wrong")

    def test_plugins_without_devices_say_what_they_provide(self, folder, run):
        hook = "from opweave.registry import hookimpl\n@hookimpl\ndef opweave_{}: return {}\n"
        folder.add("asks", hook.format("cli(app)", "None"), value="opweave_asks")
        reads = hook.format("formats()", "[]") + hook.format("placements()", "{}") + hook.format("cli(app)", "None")
        folder.add("reads", reads, entry_points="[opweave.hooks]\nreads = opweave_reads\n")
        folder.add("acme", backend(extra=hook.format("backends()", "[Acme()]") + reads), value="opweave_acme")
        folder.add("empty", hook.format("backends()", "[]"), value="opweave_empty")
        code, out, _ = run("doctor", "--json")
        found = {name: (d["status"], d["message"]) for name, d in diagnoses(out).items() if name.startswith("plugin")}
        assert code == 0
        assert found["plugin asks"] == ("ok", "1.0: commands")
        assert found["plugin reads"] == ("ok", "1.0: commands, file formats, placements")
        assert found["plugin acme"] == ("ok", "1.0: acme")
        assert found["plugin empty"] == ("ok", "1.0: no devices")

    def test_exit_status(self, folder, run):
        folder.add("cardless", backend(body="raise Unavailable('no card')"))
        assert run("doctor")[0] == 0
        assert run("doctor", "--strict")[0] == 1

    def test_a_machine_with_only_the_host_is_diagnosed(self, run):
        _, out, _ = run("doctor", "--json")
        assert diagnoses(out)["devices"]["remedy"] == pip_install("opweave-cpu")

    def test_caches_and_variables_in_force(self, run, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("OPWEAVE_PROFILE_CACHE", str(tmp_path / "file"))
        found = diagnoses(run("doctor", "--json")[1])
        assert found["cache of profiles"]["status"] == "slow"
        assert "OPWEAVE_PROFILE_CACHE" in found["cache of profiles"]["remedy"]
        assert found["variable"]["message"] == f"OPWEAVE_PROFILE_CACHE={tmp_path / 'file'} is set"

    def test_a_quota_below_the_processors(self):
        assert cores_diagnosis(Cores(8, 8, None)).status == cores_diagnosis(Cores(8, 2, 4.0)).status == "ok"
        few = cores_diagnosis(Cores(8, 8, 1.5))
        assert few.status == "slow"
        assert few.message.startswith("a quota allows 1.5 of 8 processors")
        assert few.remedy.startswith("export OMP_NUM_THREADS=2 ")

    @pytest.mark.parametrize(
        ("threads", "variable", "status", "remedy"),
        [(4, "", "ok", ""), (8, "", "slow", "export LIB_THREADS=4"), (1, "1", "slow", "unset LIB_THREADS")],
    )
    def test_threads_of_a_library(self, monkeypatch, threads, variable, status, remedy):
        monkeypatch.setenv("LIB_THREADS", variable)
        found = threads_diagnosis("library", threads, Cores(8, 4, None), ("LIB_THREADS", "OTHER_THREADS"))
        assert (found.status, found.remedy) == (status, remedy)

    def test_a_cache_that_is_switched_off(self, monkeypatch):
        monkeypatch.setenv("SOME_CACHE", "0")
        found = cache_diagnosis("cache", FileCache("SOME_CACHE", "x"), "SOME_CACHE", "built anew")
        assert (found.status, found.message, found.remedy) == (
            "slow",
            "it is switched off: built anew",
            "unset SOME_CACHE",
        )


class TestOddDevices:
    @pytest.mark.parametrize(
        "memory",
        ["5", "(1,)", "('a', None)", "(float('nan'), 1.0)", "(-1, 5)", "(7, 5)", "(0, 1 << 70)", "1 / 0"],
    )
    def test_memory_that_cannot_be(self, folder, run, memory):
        folder.add("acme", backend(f"[Unit(mem_info=lambda: {memory})]"))
        code, out, _ = run("devices", columns=120)
        assert code == 0
        assert "memory: " in out
        acme = json.loads(run("devices", "--json")[1])["devices"][0]
        assert acme["memory_total"] is None

    def test_what_a_terminal_would_obey_is_spelt_out(self, folder, run):
        odd = "\\x1b[2J\\x07 \\udc80 \\u202e \\r"
        folder.add("acme", backend(f"[Unit(description='{odd}', features=lambda: {{'{odd}': '{odd}'}})]"))
        folder.add("bad", backend(body=f"raise Unavailable('{odd}', remedy='{odd}')"))
        for command in (("devices", "--features"), ("plugins",), ("doctor",)):
            code, out, err = run(*command, columns=120)
            assert code == 0
            assert not set(out + err) & {"\x1b", "\x07", "\udc80", "\u202e", "\r"}
            assert "\\x1b[2J" in out
        acme = json.loads(run("devices", "--json")[1])["devices"][0]
        assert acme["description"] == "\x1b[2J\x07 \udc80 \u202e \r"

    def test_features_that_json_does_not_know(self, folder, run):
        odd = "{'nan': float('nan'), 5: {1}, 'deep': deep, 'bad': Bad()}"
        extra = "deep = []\nfor _ in range(5000): deep = [deep]\nclass Bad:\n    def __str__(self): 1 / 0\n"
        folder.add("acme", backend(f"[Unit(features=lambda: {odd})]", extra=extra))
        code, out, _ = run("devices", "--features", "--json")
        features = json.loads(out, parse_constant=lambda name: pytest.fail(name))["devices"][0]["features"]
        assert code == 0
        assert (features["nan"], features["5"], features["bad"]) == ("nan", "{1}", "<Bad: ZeroDivisionError>")
        assert run("devices", "--features")[0] == 0
