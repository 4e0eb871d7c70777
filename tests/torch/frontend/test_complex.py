"""Fourier transforms and complex numbers of torch, which are pairs of real ones in graphs of opweave."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import opweave as ow
from opweave_torch import import_program

DEVICES = ("cpu", "opencl:0")


class Of(torch.nn.Module):
    """A module that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def signal(*shape, dtype=torch.float32):
    return torch.from_numpy(np.random.default_rng(1).standard_normal(shape)).to(dtype)


def spectrum(*shape):
    return torch.complex(signal(*shape), signal(*shape[:-1], shape[-1]).flip(-1))


def check(function, *args, devices=DEVICES, rtol=1e-4):
    want = function(*args)
    program = torch.export.export(Of(function), args)
    for device in devices:
        with import_program(program, [device, "host"]) as model:
            got = model(*args)
        for a, b in zip(*[v if isinstance(v, tuple) else (v,) for v in (got, want)], strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            near = rtol * float(b.abs().max()) if b.numel() else 0
            torch.testing.assert_close(a, b, rtol=0, atol=near, equal_nan=True)


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@pytest.mark.parametrize("n", [1, 12, 35, 600])
def test_transforms(n, norm):
    x, z = signal(3, n), spectrum(3, n)
    check(lambda x: torch.fft.rfft(x, norm=norm), x)
    check(lambda z: torch.fft.irfft(z, 2 * n - 1, norm=norm), z)
    check(lambda z: (torch.fft.fft(z, norm=norm), torch.fft.ifft(z, norm=norm)), z)
    check(lambda x, z: (torch.fft.ihfft(x, norm=norm), torch.fft.hfft(z, 2 * n, norm=norm)), x, z)


def test_transforms_along_several_axes():
    x, z = signal(2, 6, 10), spectrum(2, 6, 10)
    check(lambda x: (torch.fft.rfft2(x), torch.fft.rfftn(x), torch.fft.fft2(x)), x)
    check(lambda z: (torch.fft.irfft2(z), torch.fft.ifftn(z, norm="ortho"), torch.fft.fft(z, dim=1, n=9)), z)
    check(lambda z: torch.fft.fftshift(torch.fft.fft2(z)), z)
    check(torch.fft.rfft, signal(4, 9, dtype=torch.float64), devices=["cpu"], rtol=1e-14)


@pytest.mark.parametrize("onesided", [True, False])
@pytest.mark.parametrize("size", [16, 30])
def test_frames(onesided, size):
    window = torch.hann_window(size)

    def there_and_back(x):
        z = torch.stft(x, size, size // 4, window=window, return_complex=True, onesided=onesided)
        return z, torch.istft(torch.polar(z.abs(), z.angle()), size, size // 4, window=window, onesided=onesided)

    check(there_and_back, signal(2, 8 * size))


def test_numbers_in_between():
    x, y = spectrum(3, 5), spectrum(5)
    check(lambda x, y: (x * y, x / y, x + y, x - 2 * y, -x, x.conj(), x * 2.5, x * (1 + 2j), x / 3), x, y)
    check(lambda x, y: (x.abs(), x.angle(), x.real, x.imag, torch.view_as_real(x), x.sum(-1), torch.exp(y)), x, y)
    check(lambda x, y: (x @ y, torch.cat([x, x.conj()]), x[:, 1:3].t(), torch.sgn(x), x + x.real, x.abs() + x), x, y)
    check(lambda a: torch.view_as_complex(a) * torch.view_as_complex(a.flip(0)), signal(4, 3, 2))


def test_sizes_and_angles_at_the_ends():
    parts = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e30, 1e-30, float("inf")])
    z = torch.complex(*torch.meshgrid(parts, parts[:-1], indexing="ij"))
    want = torch.view_as_real(z).numpy()
    with import_program(torch.export.export(Of(lambda z: (z.abs(), z.angle())), (z,)), ["cpu", "host"]) as model:
        size, angle = model(z)
    np.testing.assert_allclose(size.numpy(), np.hypot(want[..., 0], want[..., 1]), rtol=1e-6)
    np.testing.assert_allclose(angle.numpy(), np.arctan2(want[..., 1], want[..., 0]), rtol=1e-6)


class Rotated(torch.nn.Module):
    """Rotary embedding, as models write it: its factors are a complex buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("turns", torch.polar(torch.ones(6, 4), signal(6, 4)))

    def forward(self, x):
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(z * self.turns).flatten(-2)


def test_buffers_of_complex_numbers():
    x, module = signal(2, 6, 8), Rotated()
    with import_program(torch.export.export(module, (x,)), ["cpu"]) as model:
        torch.testing.assert_close(model(x), module(x))


def test_compiled_modules_with_gradients():
    def loss(x):
        return torch.fft.irfft(torch.fft.rfft(x) * 2).square().sum() + torch.fft.rfft(x).abs().sum()

    x, y = signal(3, 12).requires_grad_(), signal(3, 12).requires_grad_()
    loss(x).backward()
    torch.compile(loss, backend="opweave", options={"devices": ["cpu", "host"]})(y).backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-4, atol=1e-4)


def test_what_is_not_supported_is_refused_by_name():
    program = torch.export.export(Of(lambda z: torch.tanh(z)), (spectrum(4),))
    with (
        import_program(program, ["cpu", "host"]) as model,
        pytest.raises(ow.UnsupportedOpError, match=r"tanh.*complex"),
    ):
        model(spectrum(4))
    program = torch.export.export(Of(lambda z: z * 2), (spectrum(4),))
    with import_program(program, ["cpu"]) as model:
        with pytest.raises(ow.DTypeError, match="complex64"):
            model(signal(4))
        with pytest.raises(ow.ShapeError):
            model(spectrum(5))
