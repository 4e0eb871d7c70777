"""Small networks of the usual families, as torch modules with random weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = [
    "NETS",
    "Bert",
    "CachedAttention",
    "Gpt2",
    "Llama",
    "MobileNet",
    "ResNet",
    "Tagger",
    "UNet",
    "Vit",
    "randomized",
]


def randomized(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module in eval mode, with running statistics that are not those of a fresh one."""
    generator = torch.Generator().manual_seed(seed)
    for buffer_name, buffer in module.named_buffers():
        if buffer_name.endswith("running_mean"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
        elif buffer_name.endswith("running_var"):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return module.eval()


class Bottleneck(nn.Module):
    """A block of a ResNet (He et al., 2015)."""

    def __init__(self, width: int, inner: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = (
            nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride != 1 or width != out
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + identity)


class ResNet(nn.Module):
    def __init__(self, width: int = 8, depth: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks, before = [], width
        for stage in range(3):
            for i in range(depth):
                inner = width << stage
                blocks.append(Bottleneck(before, inner, 4 * inner, 2 if stage and not i else 1))
                before = 4 * inner
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class InvertedResidual(nn.Module):
    """A block of MobileNetV3 (Howard et al., 2019), with squeeze and excitation."""

    def __init__(self, width: int, expand: int, out: int, stride: int) -> None:
        super().__init__()
        inner = width * expand
        self.expand = nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.Hardswish())
        self.depthwise = nn.Sequential(
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.ReLU6()
        )
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(inner, inner // 4, 1), nn.ReLU(), nn.Conv2d(inner // 4, inner, 1),
            nn.Hardsigmoid(),
        )  # fmt: skip
        self.project = nn.Sequential(nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out))
        self.residual = stride == 1 and width == out

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        y = self.project(y * self.squeeze(y))
        return x + y if self.residual else y


class MobileNet(nn.Module):
    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.Hardswish())
        self.blocks = nn.Sequential(
            InvertedResidual(width, 4, width, 1), InvertedResidual(width, 4, 2 * width, 2),
            InvertedResidual(2 * width, 4, 2 * width, 1),
        )  # fmt: skip
        self.head = nn.Sequential(
            nn.Linear(2 * width, 4 * width), nn.Hardswish(), nn.Dropout(), nn.Linear(4 * width, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class UNet(nn.Module):
    """Ronneberger et al., 2015, with group norm; goes up by transposed convolution and by interpolation."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def double(before: int, after: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU(),
                nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU(),
            )  # fmt: skip

        self.down1, self.down2, self.middle = double(1, width), double(width, 2 * width), double(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.join2, self.join1 = double(4 * width, 2 * width), double(3 * width, width)
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(functional.max_pool2d(one, 2))
        three = self.middle(functional.avg_pool2d(two, 2))
        two = self.join2(torch.cat([two, self.up2(three)], 1))
        up = functional.interpolate(two, scale_factor=2.0, mode="bilinear", align_corners=False)
        return torch.sigmoid(self.out(self.join1(torch.cat([one, up], 1))))


class Vit(nn.Module):
    """Dosovitskiy et al., 2020, of torch's own encoder layers."""

    def __init__(self, size: int = 32, patch: int = 8, width: int = 32, depth: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.places = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.encoder(x))[:, 0])


class Gpt2Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, n = x.shape
        q, k, v = (
            part.view(b, t, self.heads, n // self.heads).transpose(1, 2) for part in self.qkv(self.ln_1(x)).split(n, 2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, n)
        x = x + self.proj(y)
        return x + self.out(functional.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """Radford et al., 2019: learned positions, the head shares the embedding."""

    def __init__(
        self, vocabulary: int = 100, length: int = 64, width: int = 32, depth: int = 1, heads: int = 4
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Gpt2Block(width, heads) for _ in range(depth)])
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.size, bias=False)
        self.v = nn.Linear(width, groups * self.size, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def rotated(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat([-second, first], -1) * sin

        b, t, _ = x.shape
        y = self.norm1(x)
        q = rotated(self.q(y).view(b, t, self.heads, self.size).transpose(1, 2))
        k = rotated(self.k(y).view(b, t, self.groups, self.size).transpose(1, 2))
        v = self.v(y).view(b, t, self.groups, self.size).transpose(1, 2)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, -1))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Touvron et al., 2023: rotary positions, groups of heads that share keys, RMS norm, gated feed-forward."""

    def __init__(self, vocabulary: int = 100, width: int = 32, depth: int = 1, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([LlamaBlock(width, heads, groups) for _ in range(depth)])
        self.norm, self.head = nn.RMSNorm(width, 1e-5), nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(0, size, 2).float() / size), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(ids.shape[1]).float(), self.frequencies)
        angles = torch.cat([angles, angles], -1)
        x = self.embed(ids)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


class BertLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, n = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).permute(0, 2, 1, 3) for f in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(n // self.heads) + mask
        y = torch.matmul(scores.softmax(-1), v).permute(0, 2, 1, 3).contiguous().view(b, t, n)
        x = self.norm1(x + self.o(y))
        return self.norm2(x + self.out(functional.gelu(self.fc(x))))


class Bert(nn.Module):
    """Devlin et al., 2018, with attention written out, a mask, and the mean of the tokens."""

    def __init__(
        self, vocabulary: int = 100, length: int = 64, width: int = 32, depth: int = 1, heads: int = 4
    ) -> None:
        super().__init__()
        self.words, self.places, self.types = (
            nn.Embedding(vocabulary, width),
            nn.Embedding(length, width),
            nn.Embedding(2, width),
        )
        self.register_buffer("position_ids", torch.arange(length).unsqueeze(0), persistent=False)
        self.norm = nn.LayerNorm(width, 1e-12)
        self.layers = nn.ModuleList([BertLayer(width, heads) for _ in range(depth)])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.words(input_ids) + self.places(self.position_ids[:, : input_ids.shape[1]])
        x = self.norm(x + self.types(torch.zeros_like(input_ids)))
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, mask)
        weights = attention_mask.unsqueeze(-1).to(x.dtype)
        return {"tokens": x, "mean": (x * weights).sum(1) / weights.sum(1).clamp(min=1e-9)}


class Tagger(nn.Module):
    """Two layers of a bidirectional LSTM over embeddings."""

    def __init__(self, vocabulary: int = 50, width: int = 16, tags: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, tags)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        y, (h, _) = self.lstm(self.embed(ids))
        return functional.log_softmax(self.head(y), -1), h


class CachedAttention(nn.Module):
    """One step of a decoder's layer, which keeps keys and values in buffers."""

    def __init__(self, width: int = 32, heads: int = 4, capacity: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.register_buffer("k_cache", torch.zeros(1, heads, capacity, width // heads))
        self.register_buffer("v_cache", torch.zeros(1, heads, capacity, width // heads))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        b, t, n = x.shape
        q, k, v = (p.view(b, t, self.heads, n // self.heads).transpose(1, 2) for p in self.qkv(x).split(n, 2))
        self.k_cache.index_copy_(2, position, k)
        self.v_cache[:, :, position] = v
        mask = torch.arange(self.k_cache.shape[2]) <= position[:, None]
        y = functional.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=mask)
        return y.transpose(1, 2).reshape(b, t, n)


def ids(batch: int, length: int, seed: int = 0, most: int = 50) -> Tensor:
    """Ids of tokens."""
    return torch.randint(0, most, (batch, length), generator=torch.Generator().manual_seed(seed))


def picture(batch: int, channels: int, size: int, seed: int = 0) -> Tensor:
    """A batch of pictures."""
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(seed))


NETS = {
    "resnet": (ResNet, lambda: (picture(2, 3, 64),)),
    "mobilenet": (MobileNet, lambda: (picture(2, 3, 32),)),
    "unet": (UNet, lambda: (picture(1, 1, 32),)),
    "vit": (Vit, lambda: (picture(2, 3, 32),)),
    "gpt2": (Gpt2, lambda: (ids(2, 12),)),
    "llama": (Llama, lambda: (ids(2, 12),)),
    "bert": (Bert, lambda: (ids(2, 12), torch.tensor([[1] * 12, [1] * 7 + [0] * 5]))),
    "lstm": (Tagger, lambda: (ids(2, 9),)),
}
"""Name -> the class of a network, and a function that makes arguments for it."""
