"""Continues one beginning in several ways, by a model from a GGUF file or a folder, on any devices; the beginning is
computed once. `python examples/decoder.py m.gguf --devices cpu opencl:0,cpu` runs it on cpu, then over two devices."""

import argparse
from collections.abc import Sequence

import opweave_models


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("path")
    options.add_argument("--devices", nargs="+", default=["auto"])
    options.add_argument("--beginning", default="The capital of")
    options.add_argument("--endings", nargs="+", default=[" France is", " Italy is"])
    given = options.parse_args(arguments)
    for devices in given.devices:
        names = devices.split(",")
        split = [1] * len(names) if len(names) > 1 else None
        with (
            opweave_models.load(given.path, devices, context=256, sequences=2, split=split) as llm,
            llm.session() as beginning,
        ):
            print(llm.plan)
            beginning.feed(given.beginning)
            for ending in given.endings:
                with beginning.fork() as session:
                    session.feed(ending)
                    text = "".join(piece.text for piece in session.generate(16))
                    print(f"{given.beginning}{ending}{text}")


if __name__ == "__main__":
    main()
