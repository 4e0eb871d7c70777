"""``opweave profile`` and ``opweave what-if``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

import opweave as ow
from opweave_cost.cost_model import Curve, OpCost, Profile
from tests.support.plugins_for_tests import backend


@pytest.fixture(autouse=True)
def with_the_commands(folder):
    folder.add("cost", "", value="opweave_cost.hooks")


class TestProfile:
    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch, tmp_path):
        """Measuring takes no time, and every profile is kept in a folder of the test's."""
        monkeypatch.setenv("OPWEAVE_PROFILE_CACHE", str(tmp_path / "profiles"))
        self.measured: list[str] = []
        self.contention = 0.0

        def measure(device, progress=None):
            self.measured.append(device.name)
            if progress is not None:
                progress("add f32", 0, 1)
            line = Curve.line(2e-6, 4e9)
            return Profile(device.name, 1e-6, line, line, {
                "add": {"f32": OpCost(line)}, "linear": {"f32": OpCost(line, line), "f16": OpCost(line, line)},
            }, contention=self.contention)  # fmt: skip

        monkeypatch.setattr("opweave_cost.measure.measure", measure)

    def test_table(self, folder, run):
        folder.add("acme", backend())
        code, out, err = run("profile", columns=120)
        assert (code, err) == (0, "")
        assert self.measured == ["acme", "host"]
        lines = [line.split() for line in out.splitlines()]
        assert lines[1] == ["acme", "2", "µs", "1", "µs", "4", "GB/s", "4", "GB/s", "/", "4", "GB/s", "4", "Gflop/s"]
        assert "products  f16 4 Gflop/s" in out

    def test_combinations_are_made(self, folder, run):
        folder.add("combine", "", value="opweave_combined.hooks")
        code, _, err = run("profile", "combined:host+nosuch")
        assert (code, self.measured) == (1, [])
        assert "there is no device named 'nosuch'" in err

    def test_chosen_devices_are_measured_once_without_refresh(self, folder, run):
        folder.add("acme", backend())
        run("profile", "acme")
        run("profile", "acme")
        assert self.measured == ["acme"]
        run("profile", "acme", "--refresh")
        assert self.measured == ["acme", "acme"]

    def test_what_was_measured_beside_other_programs_is_doubtful(self, folder, run):
        folder.add("acme", backend())
        self.contention = 0.7
        assert "doubtful  other programs used the processors meanwhile" in run("profile", "acme", columns=120)[1]
        assert json.loads(run("profile", "acme", "--json")[1])["profiles"][0]["contention"] == 0.7
        said = " ".join(run("doctor")[1].split())
        assert "profile of acme" in said
        assert "opweave profile --refresh acme" in said
        self.contention = 0.01
        assert "doubtful" not in run("profile", "acme", "--refresh", columns=120)[1]
        assert "profile of acme" not in run("doctor")[1]

    def test_json(self, folder, run, tmp_path):
        folder.add("acme", "print('loading')\n" + backend())
        code, out, err = run("profile", "acme", "--json")
        document = json.loads(out)
        assert (code, err) == (0, "loading\n")
        assert document["folder"] == str(tmp_path / "profiles")
        (acme,) = document["profiles"]
        assert (acme["device"], acme["launch_seconds"], acme["flops"]["f16"]) == ("acme", 2e-6, pytest.approx(4e9))
        assert Profile.from_json(acme["profile"]).device == "acme"

    TUNED = """
        from opweave.contract import Tunable

        Unit.tunables = (Tunable("tile_bytes", 64, (32, 64), list), Tunable("rows", 8, (4, 8), list))
    """

    def test_tunables_are_measured_with_the_profile_and_shown(self, folder, run, monkeypatch):
        def measure(device, progress):
            device.tunables[0].value = 32

        monkeypatch.setattr("opweave_cost.tunables.measure_tunables", measure)
        folder.add("acme", backend(extra=self.TUNED))
        assert "tunables of acme" in run("doctor")[1]
        assert "2 at their defaults, not measured on this machine" in " ".join(run("doctor")[1].split())
        _, out, _ = run("profile", "acme", columns=120)
        assert "tunables  tile_bytes 32 (default 64), rows 8" in out
        run("profile", "acme")
        assert self.measured == ["acme"]
        (acme,) = json.loads(run("profile", "acme", "--json")[1])["profiles"]
        assert acme["tunables"] == {"tile_bytes": 32, "rows": 8}
        assert "measured: tile_bytes 32, rows 8" in " ".join(run("doctor")[1].split())

    def test_a_device_that_is_not_there(self, run):
        code, out, err = run("profile", "cuda:7")
        assert (code, out) == (1, "")
        assert err.startswith("error: there is no device named 'cuda:7'")


GRAPH = """
import opweave as ow
print("making the graph")

def layers(n=40):
    w = ow.weights({str(i): ow.Spec((1024, 1024)) for i in range(n)})
    h = ow.input("x", (16, 1024))
    for i in range(n):
        h = ow.relu(ow.linear(h, w[str(i)]))
    return h
"""

CLUSTER = """
[[group]]
name = "gpu"
count = {count}
flops = 2e13
bandwidth = 2e12
memory = "20 MiB"
"""


class TestWhatIf:
    @pytest.fixture
    def files(self, tmp_path):
        (tmp_path / "graph.py").write_text(GRAPH)

        def files(count: int = 1000) -> tuple[str, str]:
            (tmp_path / "cluster.toml").write_text(CLUSTER.format(count=count))
            return f"{tmp_path / 'graph.py'}:layers", str(tmp_path / "cluster.toml")

        return files

    def test_table(self, run, files):
        code, out, err = run("what-if", *files(), columns=100)
        assert (code, err) == (0, "making the graph\n")
        lines = out.splitlines()
        assert lines[0].split() == ["device", "steps", "busy", "utilization", "memory", "used", "/", "total"]
        assert lines[1].split()[:2] == ["gpu:0", "8"]
        assert lines[1].endswith("16.1 MiB / 20 MiB")
        assert "... 2 more" in out
        assert "one run: " in out
        assert "for 9 copies, inputs and results" in out
        assert "not used: 990 of gpu" in out

    def test_json(self, run, files):
        code, out, _ = run("what-if", *files(), "--json")
        document = json.loads(out)
        assert code == 0
        assert document["groups"] == [{"name": "gpu", "count": 1000}]
        assert [d["name"] for d in document["devices"]] == [f"gpu:{i}" for i in range(10)]
        assert document["seconds"] == pytest.approx(
            sum(d["busy_seconds"] for d in document["devices"]) + document["copy_seconds"]
        )
        assert document["devices"][0]["memory"]["weights"] == 16 << 20

    def test_pipelining_spreads_the_graph(self, run, files):
        plain = json.loads(run("what-if", *files(), "--json")[1])
        spread = json.loads(run("what-if", *files(), "--json", "--pipeline")[1])
        assert len(spread["devices"]) > len(plain["devices"])
        assert spread["interval_seconds"] < plain["interval_seconds"]

    @pytest.mark.parametrize(
        ("code", "says"),
        [
            ("def layers(:", r"graph\.py: SyntaxError: invalid syntax"),
            ("import nosuch_module", r"graph\.py, line 1: ModuleNotFoundError: No module named 'nosuch_module'"),
            ("def layers():\n    raise ValueError('no')", r"graph\.py, line 2: ValueError: no$"),
            ("def layers():\n    return 3", "outputs are a tensor, a sequence or a mapping of tensors, not 3"),
        ],
    )
    def test_a_graph_that_cannot_be_made_is_an_error_that_says_where(
        self, run, files, tmp_path, monkeypatch, code, says
    ):
        _, cluster = files()
        (tmp_path / "graph.py").write_text(code)
        monkeypatch.chdir(tmp_path)
        code, out, err = run("what-if", "graph.py:layers", cluster)
        assert (code, out) == (1, "")
        assert re.search(says, err.strip())
        assert err.startswith("error: ")

    @pytest.mark.parametrize("combined", [False, True])
    def test_steps_are_measured_on_devices_that_groups_are_like(self, run, files, monkeypatch, combined):
        measured: list[tuple[str, set[tuple[int, ...]]]] = []

        def measure(nodes: Iterable[ow.Tensor], device: ow.Device) -> None:
            measured.append((device.name, {node.shape for node in nodes}))
            raise ow.AllocationError("memory of cpu", 1, 0)

        monkeypatch.setattr("opweave_cost.what_if_command.measure_nodes", measure)
        graph, cluster = files()
        both = f"count = 2\ncombined = {str(combined).lower()}\n"
        Path(cluster).write_text(f'[[group]]\nname = "here"\nlike = "cpu"\n{both}')
        code, _, err = run("what-if", graph, cluster, "--json")
        assert (code, "not measured on cpu, predicted by its profile" in err) == (0, True)
        assert {name for name, _ in measured} == {"cpu"}
        whole, *parts = [shapes for _, shapes in measured]
        assert bool(parts) == combined, "of weights that are split, their parts too"
        assert all(shapes != whole for shapes in parts)
        measured.clear()
        assert run("what-if", graph, cluster, "--json", "--no-measure")[0] == 0
        assert not measured

    def test_too_little_memory_is_said_and_fails(self, run, files):
        code, out, _ = run("what-if", *files(2))
        assert code == 1
        assert "out of memory: 1 of 2 devices" in out
        assert "lacks" in out

    @pytest.mark.parametrize(
        ("graph", "message"),
        [
            ("graph.py", "a graph is given as FILE.py:FUNCTION, not 'graph.py'"),
            ("nowhere.py:f", "there is no file 'nowhere.py'"),
        ],
    )
    def test_graphs_that_are_not_there(self, run, files, graph, message):
        code, out, err = run("what-if", graph, files()[1])
        assert (code, out) == (1, "")
        assert message in err

    def test_functions_and_clusters_that_are_not_there(self, run, files):
        graph, cluster = files()
        assert "did you mean 'layers'?" in run("what-if", graph[:-1], cluster)[2]
        assert "cannot read the cluster file" in run("what-if", graph, cluster + "x")[2]
