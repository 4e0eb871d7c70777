"""``torch.compile(module, backend="opweave")``: without and with gradients."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import opweave as ow
import opweave_torch
from opweave.errors import SchedulerError, UnknownNameError
from opweave_torch.frontend.contents import SAMPLES, Contents
from tests.support.torch_nets import Llama, ids, picture

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(module: Any, *devices: str, **more: Any) -> Any:
    return torch.compile(module, backend="opweave", options={"devices": list(devices) or ["torch:cpu"]}, **more)


def test_torch_knows_the_backend() -> None:
    assert "opweave" in torch._dynamo.list_backends()


@pytest.mark.parametrize("device", ["cpu", "opencl:0"])
def test_inference(device: str) -> None:
    try:
        ow.device(device)
    except ow.OpweaveError as error:
        pytest.skip(str(error))
    module = Llama().eval()
    run = compiled(module, device)
    with torch.no_grad():
        for seed in range(2):
            given = ids(2, 7, seed)
            torch.testing.assert_close(run(given), module(given), rtol=2e-5, atol=2e-5)


def test_shapes_that_change() -> None:
    module = nn.Sequential(nn.Embedding(50, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.Flatten(1))
    run = compiled(module, "cpu", dynamic=True)
    with torch.no_grad():
        for batch, length in ((2, 7), (3, 9), (2, 12)):
            given = ids(batch, length)
            torch.testing.assert_close(run(given), module(given), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("device", ["torch:cpu", "cpu"])
def test_batches_of_0_and_1(device: str) -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))
    run = compiled(module, device, dynamic=False)
    for batch in (0, 1):
        given = torch.randn(batch, 8)
        with torch.no_grad():
            torch.testing.assert_close(run(given), module(given), rtol=2e-5, atol=2e-5)
        gradients = []
        for call in (run, module):
            module.zero_grad()
            x = given.clone().requires_grad_()
            call(x).square().sum().backward()
            gradients.append([x.grad, *[p.grad for p in module.parameters()]])
        torch.testing.assert_close(gradients[0], gradients[1], rtol=2e-5, atol=2e-5)


def test_parameters_that_change_between_calls() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    run = compiled(module)
    x = picture(1, 3, 6)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(run(x), module(x))
            module[0].weight.add_(0.5)
            module.load_state_dict({**module.state_dict(), "1.running_mean": torch.ones(4)})
            torch.testing.assert_close(run(x), module(x))


def test_buffers_that_the_module_changes() -> None:
    module = nn.BatchNorm1d(4).train()
    other = copy.deepcopy(module)
    run = compiled(module)
    with torch.no_grad():
        for i in range(3):
            x = torch.randn(5, 4) + i
            torch.testing.assert_close(run(x), other(x))
    torch.testing.assert_close(module.state_dict(), other.state_dict())


def test_views_and_arguments_as_results() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y.t(), y[0], x, x.t(), y

    x = torch.randn(3, 4)
    with torch.no_grad():
        for got, want in zip(compiled(function)(x), function(x), strict=True):
            torch.testing.assert_close(got, want)
            assert got.stride() == want.stride()


class Mixed(nn.Module):
    """Operators that training needs gradients of: convolution, pooling, norms, attention, embedding, activations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm, self.group = nn.LayerNorm(8), nn.GroupNorm(2, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.embed(x))
        q = y.unsqueeze(1)
        y = y + functional.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(1)
        y = y + self.group(self.conv(y.transpose(1, 2))).transpose(1, 2)
        y = self.down(functional.gelu(self.up(y)))
        return functional.cross_entropy(y.flatten(0, 1), x.flatten() % 8)


def pictures_net() -> nn.Module:
    """Convolutions, batch norm, pooling."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.ConvTranspose2d(4, 4, 2, 2),
        nn.AvgPool2d(2), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "devices"),
    [("mixed", "torch:cpu"), ("mixed", "opencl:0,host"), ("pictures", "torch:cpu")],
)
def test_training(kind: str, devices: str) -> None:
    names = devices.split(",")
    try:
        ow.device(names[0])
    except ow.OpweaveError as error:
        pytest.skip(str(error))
    module: nn.Module = Mixed() if kind == "mixed" else pictures_net()
    module.train()
    other = copy.deepcopy(module)
    run = compiled(module, *names)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (module, other)]
    for seed in range(3):
        x = ids(2, 6, seed, 20) if kind == "mixed" else picture(2, 3, 16, seed)
        for optimizer, model in zip(optimizers, (run, other), strict=True):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
    most = max(float(p.grad.abs().max()) for p in other.parameters() if p.grad is not None)
    for (name, p), q in zip(module.named_parameters(), other.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4 * most, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_dropout_drops_the_same_in_forward_and_backward() -> None:
    x = torch.ones(1000, requires_grad=True)
    y = compiled(lambda x: functional.dropout(x, 0.25))(x)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
    torch.testing.assert_close(y, torch.where(y == 0, 0.0, 4 / 3))
    assert 600 < int((y > 0).sum()) < 900
    with torch.no_grad():
        again = compiled(lambda x: functional.dropout(x, 0.25))
        assert not torch.equal(again(x), again(x))


@pytest.mark.parametrize(
    ("options", "error"), [({"device": ["cpu"]}, UnknownNameError), ({"devices": "cpu"}, SchedulerError)]
)
def test_wrong_options(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=error.__name__):
        torch.compile(lambda x: x + 1, backend="opweave", options=options)(torch.ones(3))


DEVICES = ("cpu", "torch:cpu", "ort:cpu", "opencl:0")


def on(device: str) -> list[str]:
    try:
        ow.device(device)
    except ow.OpweaveError as error:
        pytest.skip(str(error))
    return list(dict.fromkeys([device, "host"]))


WRITTEN: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 8)), lambda: torch.randn(4, 64)),
    "packed": (lambda: nn.Sequential(nn.Linear(512, 640)), lambda: torch.randn(64, 512)),
    "folded": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)),
        lambda: torch.randn(2, 3, 12, 12),
    ),
    "known statistics": (lambda: nn.Sequential(nn.BatchNorm1d(8), nn.ReLU()), lambda: torch.randn(5, 8)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(20, 8), nn.LayerNorm(8)), lambda: torch.randint(20, (2, 5))),
}


def by_data(module: nn.Module) -> None:
    """As exponential averages, clipping and merges of adapters write."""
    for p in module.parameters():
        p.data.mul_(2.0).add_(0.25)


def of_one_element(module: nn.Module) -> None:
    next(iter(module.parameters())).data.view(-1)[-1] += 3.0


def by_numpy(module: nn.Module) -> None:
    for p in module.parameters():
        p.detach().numpy()[...] *= -1.5


def of_buffers(module: nn.Module) -> None:
    for b in module.buffers():
        if b.is_floating_point():
            b.data.add_(0.5)


def in_training(module: nn.Module) -> None:
    """An optimizer, and statistics that training updates."""
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    with torch.enable_grad():
        out: torch.Tensor = module(module.given)
        out.square().sum().backward()
    optimizer.step()
    module.eval()


def by_loading(module: nn.Module) -> None:
    module.load_state_dict({k: v + 1 if v.is_floating_point() else v for k, v in module.state_dict().items()})


def by_replacing(module: nn.Module) -> None:
    """Parameters in other memory; that of the old ones is freed, and may be theirs next time."""
    for layer in module.modules():
        for name, p in list(layer.named_parameters(recurse=False)):
            setattr(layer, name, nn.Parameter(p.detach() * 1.5))


def of_storage(module: nn.Module) -> None:
    for p in module.parameters():
        p.data = (p.data * 0.5 + 1).clone()
        p.data.set_((p.data * 2).clone())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", WRITTEN)
def test_a_call_sees_what_was_written_to_parameters(device: str, kind: str) -> None:
    names = on(device)
    make, given = WRITTEN[kind]
    module, x = make().eval(), given()
    module.given = x
    run = compiled(module, *names)
    with torch.no_grad():
        run(x)
        for write in (by_data, of_one_element, by_numpy, of_buffers, in_training, by_loading, by_replacing, of_storage):
            write(module)
            torch.testing.assert_close(run(x), module(x), rtol=1e-3, atol=1e-3, msg=lambda m, w=write: f"{w}: {m}")


@pytest.mark.parametrize("device", ["cpu", "opencl:0"])
def test_large_parameters_are_compared_by_samples_which_is_said(device: str) -> None:
    names = on(device)
    module, x = nn.Linear(300, 200).eval(), torch.randn(2, 300)
    run = torch.compile(module, backend="opweave", options={"devices": names, "compared": 1000})
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(x)
        run(x)
        by_data(module)
        torch.testing.assert_close(run(x), module(x), rtol=1e-4, atol=1e-4)
        module.weight.data.view(-1).view(torch.uint8)[2] ^= 0xFF  # between two samples
        opweave_torch.refresh()
        torch.testing.assert_close(run(x), module(x), rtol=1e-4, atol=1e-4)
    said = [str(w.message) for w in caught if issubclass(w.category, ow.OpweaveWarning)]
    if device == "cpu":  # parameters are used where they lie
        assert not said
    else:
        assert len(said) == 2
        assert "235 KiB" in said[0]
        assert "opweave_torch.refresh()" in said[0]


def test_an_imported_model_sees_what_was_written() -> None:
    module, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval(), torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        for names in (["cpu"], ["torch:cpu"]):
            with opweave_torch.import_program(torch.export.export(module, (x,)), names) as model:
                for write in (by_data, by_numpy, of_buffers):
                    torch.testing.assert_close(model(x), module(x), rtol=1e-4, atol=1e-4)
                    write(module)
                torch.testing.assert_close(model(x), module(x), rtol=1e-4, atol=1e-4)
                built = model.traced[0]
                model.refresh()
                torch.testing.assert_close(model(x), module(x), rtol=1e-4, atol=1e-4)
                assert model.traced[0] == built + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("compared", [0, 1 << 22])
def test_contents(dtype: torch.dtype, compared: int) -> None:
    """NaN equals itself; each byte counts where all are compared; views that are not dense, and no elements."""
    for shape in ((), (0,), (1,), (7,), (3, 300_001)):
        whole = torch.zeros(shape, dtype=dtype)
        if dtype.is_floating_point:
            whole.fill_(float("nan"))
        tensors = [whole, whole.t() if whole.ndim == 2 else whole]
        contents = Contents(tensors, compared)
        assert contents.exact is (whole.nbytes * 2 <= max(compared, SAMPLES))
        assert not contents.changed()
        if whole.numel():
            whole.view(-1)[-1] = 1
            assert contents.changed() or not contents.exact
            whole.fill_(1)
            assert contents.changed()
