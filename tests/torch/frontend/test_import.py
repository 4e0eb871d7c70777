"""`import_program`: modules give what torch gives, on every placement."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim, export

import opweave as ow
from opweave.errors import DTypeError, SchedulerError, ShapeError, UnknownNameError, UnsupportedOpError
from opweave_torch import import_program
from tests.support.torch_nets import NETS, CachedAttention, Llama, Tagger, ids, picture, randomized

pytestmark = [
    # Of torch's own export.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*were assigned during export"),
]
PLACEMENTS = ("torch:cpu", "cpu", "opencl:0")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}


@pytest.fixture(params=PLACEMENTS)
def devices(request: pytest.FixtureRequest) -> list[str]:
    names = request.param.split(",")
    for name in names:
        try:
            ow.device(name)
        except ow.OpweaveError as error:
            pytest.skip(str(error))
    return names


def exported(module: nn.Module, *args: Any, **more: Any) -> torch.export.ExportedProgram:
    return export(module, args, **more)


def assert_same(got: Any, want: Any) -> None:
    if isinstance(want, dict):
        assert list(got) == list(want)
        got, want = tuple(got.values()), tuple(want.values())
    if isinstance(want, tuple):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            assert_same(g, w)
        return
    assert isinstance(got, torch.Tensor)
    assert got.dtype is want.dtype
    assert got.shape == want.shape
    limit = TOLERANCE.get(want.dtype, 0)
    torch.testing.assert_close(got, want, rtol=limit, atol=limit, equal_nan=True)


@pytest.fixture(scope="module")
def programs() -> dict[str, Any]:
    """Each network exported once, with its arguments and what torch gives."""
    found = {}
    for name, (cls, args) in NETS.items():
        torch.manual_seed(0)
        module, given = randomized(cls()), args()
        with torch.no_grad():
            found[name] = export(module, given), given, module(*given)
    return found


@pytest.mark.parametrize("name", NETS)
def test_networks_on_every_placement(name: str, devices: list[str], programs: dict[str, Any]) -> None:
    program, args, want = programs[name]
    with import_program(program, devices) as model:
        assert_same(model(*args), want)
        assert "custom" not in str(model.explain())


@pytest.mark.parametrize("name", ["unet", "llama"])
def test_networks_split_over_two_memories(name: str, programs: dict[str, Any]) -> None:
    program, args, want = programs[name]
    try:
        ow.device("opencl:0")
    except ow.OpweaveError as error:
        pytest.skip(str(error))
    with import_program(program, ["opencl:0", "cpu"]) as model:
        placed = sorted(model.weights)
        half = {name: "cpu" if i < len(placed) // 2 else "opencl:0" for i, name in enumerate(placed)}
    # Rates that were measured on a busy machine may offload all of the work to the first device.
    with (
        ow.Scheduler(["opencl:0", "cpu"], op_offload=False) as scheduler,
        import_program(program, scheduler, weights=half) as model,
    ):
        assert_same(model(*args), want)
        assert {split.target.name for split in model.program().splits} == {"opencl:0", "cpu"}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float64),
        ("llama", torch.bfloat16),
    ],
    ids=str,
)
def test_networks_in_other_types(name: str, dtype: torch.dtype) -> None:
    cls, args = NETS[name]
    torch.manual_seed(0)
    module = randomized(cls()).to(dtype)
    given = tuple(a.to(dtype) if a.is_floating_point() else a for a in args())
    with torch.no_grad():
        want = module(*given)
    with import_program(export(module, given), ["cpu", "torch:cpu"]) as model:
        assert_same(model(*given), want)


def test_dynamic_batch_and_length() -> None:
    torch.manual_seed(0)
    module = Llama().eval()
    program = exported(module, ids(2, 8), dynamic_shapes=({0: Dim("batch"), 1: Dim("length", max=64)},))
    with import_program(program, ["cpu"]) as model:
        for batch, length in ((2, 8), (1, 1), (3, 17), (2, 8)):
            given = ids(batch, length, seed=length)
            with torch.no_grad():
                assert_same(model(given), module(given))
        assert model.traced[0] == 3
        with pytest.raises(ShapeError, match="ids"):
            model(ids(1, 65))


class Pooled(nn.Module):
    """Rows, and what is left of all of them together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.layers(x)
        return y, y.sum(0), torch.cat([y, torch.ones(1, 4)])


@pytest.mark.parametrize("parallel", [False, True], ids=["in turn", "parallel"])
def test_batches_of_0_and_1(devices: list[str], parallel: bool) -> None:
    module = Pooled()
    for batch in (0, 1):
        given = torch.randn(batch, 8)
        with torch.no_grad(), ow.Scheduler(devices, parallel=parallel) as scheduler:
            program = exported(module, given)
            assert_same(import_program(program, scheduler)(given), module(given))


def test_dynamic_pictures() -> None:
    layers = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)
    module = randomized(nn.Sequential(*layers))
    program = exported(module, picture(2, 3, 64), dynamic_shapes=({0: Dim("n"), 2: Dim.AUTO, 3: Dim.AUTO},))
    with import_program(program, ["torch:cpu"]) as model:
        for n, size in ((1, 32), (3, 48)):
            given = picture(n, 3, size)
            with torch.no_grad():
                assert_same(model(given), module(given))


def test_recurrent_networks_for_any_batch() -> None:
    torch.manual_seed(0)
    module = Tagger().eval()
    # torch fixes the length of sequences when it exports recurrent layers.
    program = exported(module, ids(2, 4), dynamic_shapes=({0: Dim("batch")},))
    with import_program(program, ["cpu"]) as model:
        for batch in (2, 5):
            with torch.no_grad():
                assert_same(model(ids(batch, 4)), module(ids(batch, 4)))


@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize(("bias", "both", "first"), [(True, True, True), (False, False, False)])
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_lstms_whose_states_are_projected(devices: list[str], bias: bool, both: bool, first: bool, batch: int) -> None:
    """``proj_size``: the state is a product of the output of the gates, and as wide as the output."""
    module = nn.LSTM(4, 6, 2, bias=bias, batch_first=first, bidirectional=both, proj_size=3)
    x = torch.randn((batch, 5, 4) if first else (5, batch, 4))
    start = torch.randn(4 if both else 2, batch, 3), torch.randn(4 if both else 2, batch, 6)
    with torch.no_grad():
        y, (h, c) = module(x, start)
    with import_program(exported(module, x, start), [*devices, "host"]) as model:
        found, (state, cell) = model(x, start)
    for got, want in ((found, y), (state, h), (cell, c)):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_other_recurrent_layers(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module = kind(4, 6, 2).eval()
    given = torch.randn(5, 3, 4), torch.randn(2, 3, 6)
    with torch.no_grad():
        want = module(*given)
    with import_program(exported(module, *given), ["cpu"]) as model:
        assert_same(model(*given), want)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_parameters_are_shared_with_the_module() -> None:
    module = nn.Linear(64, 64)
    with import_program(exported(module, torch.ones(1, 64)), ["torch:cpu"]) as model:
        data = model.weights["weight"].leaf.data  # type: ignore[union-attr]
        assert data is not None
        assert data.ctypes.data == module.weight.data_ptr()
        x = torch.randn(1, 64)
        assert_same(model(x), module(x).detach())
        # Neither is it copied for a device that computes in the memory of the process.
        assert model.program().memory["torch:cpu"].weights in (0, module.weight.nbytes + module.bias.nbytes)


def test_key_value_cache_in_buffers(devices: list[str]) -> None:
    torch.manual_seed(0)
    module = CachedAttention().eval()
    shapes = {1: Dim.AUTO}, {0: Dim.AUTO}
    program = exported(module, torch.randn(1, 3, 32), torch.arange(3), dynamic_shapes=shapes)
    with import_program(program, devices) as model:
        assert set(model.states) == {"k_cache", "v_cache"}
        start = 0
        for n in (3, 1, 1, 2):
            x, position = torch.randn(1, n, 32), torch.arange(start, start + n)
            start += n
            with torch.no_grad():
                assert_same(model(x, position), module(x, position))
        assert_same(model.read("k_cache"), module.k_cache)
        assert_same(model.read("v_cache"), module.v_cache)
        # Only the new rows are written.
        assert str(model.explain(x, position)).count("index_copy   f32") == 2
        model.write("k_cache", torch.ones(1, 4, 16, 8))
        assert bool((model.read("k_cache") == 1).all())
        with pytest.raises(ShapeError):
            model.write("k_cache", torch.ones(3))
        with pytest.raises(UnknownNameError):
            model.read("z_cache")


class Counter(nn.Module):
    """Writes its buffers in several ways; returns values from before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.arange(12.0).reshape(4, 3))
        self.register_buffer("count", torch.tensor(5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        before = self.rows * 1
        self.rows[1:3] = x
        self.rows[:, 0] += 1
        self.count += 1
        return before + self.rows, self.rows, self.count


def test_buffers_written_in_several_ways() -> None:
    module = Counter()
    program = exported(Counter(), torch.ones(2, 3))
    with import_program(program, ["cpu"]) as model:
        kept = []
        for i in range(3):
            x = torch.full((2, 3), float(i))
            got, want = model(x), tuple(v.clone() for v in module(x))
            assert_same(got, want)
            kept.append((got[1], want[1]))
        for got, want in kept:  # results do not change with later calls
            assert_same(got, want)
        assert_same(model.read("rows"), module.rows)
        assert int(model.read("count")) == 8


def test_running_statistics_while_training() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    program = exported(module, picture(2, 3, 8))
    with import_program(program, ["torch:cpu"]) as model:
        for i in range(3):
            x = picture(2, 3, 8, seed=i)
            assert_same(model(x), module(x).detach())
        assert_same(model.read("1.running_mean"), module[1].running_mean)
        assert_same(model.read("1.running_var"), module[1].running_var)


class Doubler(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + 1


@pytest.mark.parametrize("make", [lambda: torch.ones(3), lambda: np.ones(3, np.float32)])
def test_arguments_that_the_module_changes(make: Any) -> None:
    with import_program(exported(Doubler(), torch.ones(3)), ["cpu"]) as model:
        x = make()
        assert_same(model(x), torch.full((3,), 3.0))
        assert list(x) == [2, 2, 2]


# --- arguments and results ------------------------------------------------------------------------------------------


class Nested(nn.Module):
    def forward(self, pair: dict[str, torch.Tensor], *, scale: torch.Tensor, n: int) -> dict[str, Any]:
        return {"sum": (pair["a"] + pair["b"]) * scale, "same": [pair["a"], 7], "ones": torch.ones(n)}


def test_structures_keywords_arrays_and_numbers() -> None:
    a, b, scale = torch.ones(2), torch.arange(2.0), torch.tensor(3.0)
    program = export(Nested(), ({"a": a, "b": b},), {"scale": scale, "n": 4})
    with import_program(program, ["cpu"]) as model:
        got = model({"a": a.numpy(), "b": b}, n=4, scale=3.0)
        assert_same(got["sum"], torch.tensor([3.0, 6.0]))
        assert_same(got["same"][0], a)
        assert got["same"][1] == 7
        assert_same(got["ones"], torch.ones(4))
        with pytest.raises(SchedulerError, match="n"):
            model({"a": a, "b": b}, n=5, scale=scale)
        with pytest.raises(SchedulerError, match="keywords"):
            model({"a": a, "b": b}, scale=scale)


def test_arguments_that_do_not_fit() -> None:
    with import_program(exported(nn.Linear(4, 2), torch.ones(3, 4)), ["cpu"]) as model:
        with pytest.raises(ShapeError, match=r"\(3, 4\), not \(3, 5\)"):
            model(torch.ones(3, 5))
        with pytest.raises(DTypeError, match="f32, not f64"):
            model(torch.ones(3, 4).double())
        with pytest.raises(SchedulerError, match="exported for 1 arguments"):
            model()
    with pytest.raises(DTypeError, match=r"torch\.export"):
        import_program(nn.Linear(4, 2))


def test_results_on_the_device() -> None:
    with import_program(exported(nn.Linear(4, 2), torch.ones(3, 4)), ["torch:cpu"]) as model:
        x = torch.randn(3, 4)
        assert_same(model.run((x,), on_device=True), model(x))


def test_plan_explain_and_program() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with import_program(exported(module, torch.ones(3, 4)), ["cpu", "torch:cpu"], placement="cost") as model:
        planned = model.plan()
        assert {split.target.name for split in planned.splits} <= {"cpu", "torch:cpu"}
        shown = str(model.explain(torch.ones(3, 4)))
        assert "0/linear" in shown
        assert "2/linear" in shown
        assert model.program() is model.program(torch.ones(3, 4))


def test_a_scheduler_to_share() -> None:
    scheduler = ow.Scheduler(["cpu"])
    x = torch.ones(1, 4)
    for module in (nn.Linear(4, 2), nn.Linear(4, 3)):
        with import_program(exported(module, x), scheduler) as model:
            assert_same(model(x), module(x).detach())
    scheduler.close()


@pytest.fixture
def library() -> Iterator[None]:
    """An operator of another library."""

    @torch.library.custom_op("opweave_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(lambda x: torch.empty_like(x))
    yield
    torch.library.Library("opweave_tests", "FRAGMENT")._destroy()


class Foreign(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.i0(torch.ops.opweave_tests.twice(x)) + 1


def test_other_operators_run_by_torch_on_the_host(library: None, devices: list[str]) -> None:
    x = torch.randn(5)
    with import_program(exported(Foreign(), x), [*devices, "host"]) as model:
        assert_same(model(x), Foreign()(x))
        assert "custom" in str(model.explain())


class Refused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Chooser()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sum() + torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


class Chooser(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.nonzero().float()


def test_what_cannot_be_expressed_is_listed_with_places() -> None:
    program = exported(Refused(), torch.ones(3))
    with pytest.raises(UnsupportedOpError, match=r"nonzero\.default \(inner, .*test_import\.py.*cond \(") as caught:
        import_program(program, ["cpu"])
    assert "in forward" in str(caught.value)
