"""Reads the text in a picture with the three networks of rapidocr, each on another device: one finds lines, one says
which of them are upside down, one reads them. `pip install --no-deps rapidocr-onnxruntime pillow` brings them."""

import argparse
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

import opweave as ow
import opweave_onnx

FOLDER = Path(find_spec("rapidocr_onnxruntime").submodule_search_locations[0], "models")  # type: ignore[index,union-attr]
FILES = {"find": "ch_PP-OCRv4_det_infer", "turn": "ch_ppocr_mobile_v2.0_cls_infer", "read": "ch_PP-OCRv4_rec_infer"}
TEXT = ("One graph, many devices", "Hello 2026")


def picture(lines=TEXT, upside_down=()):
    """White, with black lines of text below each other."""
    image = Image.new("RGB", (480, 80 * len(lines) + 32), "white")
    for i, line in enumerate(lines):
        strip = Image.new("RGB", (420, 56), "white")
        ImageDraw.Draw(strip).text((8, 8), line, "black", ImageFont.load_default(36))
        image.paste(strip.rotate(180) if i in upside_down else strip, (24, 80 * i + 24))
    return image


def load(devices):
    """The networks, each on a device of its own as far as there are enough."""
    return {
        job: opweave_onnx.load(FOLDER / f"{name}.onnx", [devices[i % len(devices)], "host"])
        for i, (job, name) in enumerate(FILES.items())
    }


def normalized(image, height=None, width=None):
    """(1, 3, height, width), from -1 to 1."""
    if height is not None:
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, np.float32)[:, :, ::-1] / 127.5 - 1  # blue comes first
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])


def rows(mask):
    """From where to where rows of a picture have something in them, and in these rows columns."""
    for top, bottom in runs(mask.any(1)):
        for left, right in [*runs(mask[top:bottom].any(0))][:1]:
            last = max(end for _, end in runs(mask[top:bottom].any(0)))
            yield top, bottom, left, max(right, last)


def runs(flags):
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(int)))
    return zip(edges[::2], edges[1::2], strict=True)


def read(image, networks):
    """The lines of text in a picture, from the top."""
    width, height = (32 * max(round(n / 32), 1) for n in image.size)
    image = image.resize((width, height))
    pixels = (np.asarray(image, np.float32)[:, :, ::-1] / 255 - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)
    share = networks["find"](x=pixels.transpose(2, 0, 1)[None].astype(np.float32))[0, 0]
    letters = ["", *networks["read"].metadata["character"].split("\n"), " "]
    for top, bottom, left, right in rows(share > 0.3):
        grow = int(0.8 * (bottom - top))
        line = image.crop(
            (max(left - grow, 0), max(top - grow, 0), min(right + grow, width), min(bottom + grow, height))
        )
        upright, turned = networks["turn"](x=normalized(line, 48, 192))[0]
        line = line.rotate(180) if turned > max(upright, 0.9) else line
        found = networks["read"](x=normalized(line, 48, max(round(48 * line.width / line.height), 48)))[0]
        best = found.argmax(1)
        kept = best[(best > 0) & (np.diff(best, prepend=-1) != 0)]  # 0 stands between letters
        yield "".join(letters[i] for i in kept)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--devices", nargs="+", default=[d.name for d in ow.devices() if d.kind is not ow.Kind.HOST])
    options.add_argument("--image", help="a picture with lines of text; default: one that is made here")
    given = options.parse_args()
    networks = load(given.devices)
    for line in read(Image.open(given.image).convert("RGB") if given.image else picture(upside_down=(1,)), networks):
        print(line)
    for job, network in networks.items():
        print(f"{job}: {network.scheduler.devices[0].name}")
