"""``opweave chat | generate | embed | models info | models plan | models convert | models quantize | models bench |
serve-model``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Final

import numpy as np
import typer
from rich.text import Text

import opweave as ow
from opweave.cli.options import Json, writable_file
from opweave.cli.output import Row, plain, print_json, print_rows
from opweave.collector import collector_paused
from opweave.errors import AllocationError, BoundsError, FormatError, Unavailable
from opweave.units import human_bytes
from opweave_models.files import ModelFile, open_model
from opweave_models.model import FullContext, Model, load
from opweave_models.placement import Plan, plan_placement, summary
from opweave_models.sampling import Piece, Sampling, check_options
from opweave_models.writing import new_file, write_gguf

__all__ = ["add"]

File = Annotated[Path, typer.Argument(help="A GGUF file, or a folder as Hugging Face lays it out.")]
Devices = Annotated[str, typer.Option("--devices", help="Names, separated by commas; auto: graphics cards, then CPU.")]
Context = Annotated[int | None, typer.Option("--context", help="Tokens of the longest sequence.")]
KV = Annotated[str, typer.Option("--kv", help="Type of keys and values: f32, f16, bf16, q8_0, q4_0.")]
Precision = Annotated[str, typer.Option("--precision", help="exact, bf16 or int8 (as llama.cpp computes).")]
Memory = Annotated[list[str] | None, typer.Option("--memory", help="A budget: torch:cuda:0=20GiB. Repeatable.")]
Split = Annotated[str | None, typer.Option("--split", help="How many layers each device gets, such as 3,1.")]
Experts = Annotated[str | None, typer.Option("--experts", help="The device for the weights of experts.")]
Place = Annotated[list[str] | None, typer.Option("--place", help="Weights by pattern: *ffn_up*=cpu. Repeatable.")]
Quantize = Annotated[str | None, typer.Option("--quantize", help="Round float matrices to this type: q4_k, f16.")]
Repack = Annotated[str | None, typer.Option("--repack", help="Bytes for packed copies of weights, by device: 2GiB.")]
Template = Annotated[str | None, typer.Option("--template", help="gemma, chatml, plain, or a file with Jinja.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens of an answer, at most.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0: always the most likely token.")]
TopK = Annotated[int, typer.Option("--top-k")]
TopP = Annotated[float, typer.Option("--top-p")]
MinP = Annotated[float, typer.Option("--min-p")]
Penalty = Annotated[float, typer.Option("--repeat-penalty")]
Seed = Annotated[int, typer.Option("--seed")]
Schema = Annotated[
    Path | None,
    typer.Option("--schema", exists=True, dir_okay=False, help="A JSON schema that the answer is held to."),
]

QUEUE_HELP: Final = "Requests that may wait; 0: those that cannot begin at once are refused."
CHAT_HELP: Final = "/clear begins a new chat, /quit or the end of the input ends it"


def add(app: typer.Typer) -> None:
    """Add the commands to an app."""
    app.command("chat")(chat)
    app.command("generate")(generate)
    app.command("embed")(embed)
    app.command("serve-model")(serve_model)
    group = typer.Typer(no_args_is_help=True, help="Look at, plan, convert, quantize and measure models.")
    group.command("info")(info)
    group.command("plan")(plan)
    group.command("convert")(convert)
    group.command("quantize")(quantize)
    group.command("bench")(bench)
    app.add_typer(group, name="models")


def _pairs(given: list[str] | None, what: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in given or ():
        name, equals, value = each.rpartition("=")
        if not equals or not name or not value:
            raise BoundsError(f"--{what} takes NAME=VALUE, not {each!r:.80}")
        found[name] = value
    return found


def _placement(
    memory: list[str] | None, split: str | None, experts: str | None, place: list[str] | None
) -> dict[str, Any]:
    """The options of a placement, as `plan_placement` takes them."""
    try:
        shares = None if split is None else [float(part) for part in split.split(",")]
    except ValueError:
        raise BoundsError(f"--split takes numbers, such as 3,1, not {split!r:.80}") from None
    return {"memory": _pairs(memory, "memory"), "split": shares, "experts": experts, "patterns": _pairs(place, "place")}


def _decoder(file: Path) -> ModelFile:
    """The opened model; an encoder is refused before its context is, and before seconds of loading."""
    with collector_paused():
        opened = open_model(file)
    opened.config.check_decoder()
    return opened


def _template(given: str | None) -> str | None:
    return _text(Path(given)) if given is not None and os.path.isfile(given) else given


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise FormatError(f"{path} is no text in UTF-8: {error}") from None


def _piece(text: str) -> None:
    sys.stdout.write(plain(text))
    sys.stdout.flush()


def _written(pieces: Iterator[Piece]) -> str:
    text = ""
    for piece in pieces:
        text += piece.text
        _piece(piece.text)
    _piece("\n")
    return text


def resident() -> str:
    """The memory that the process has, as the system counts it; "" where it does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return f", {human_bytes(int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE'))} of memory"
    except OSError:
        return ""


def _report(model: Model) -> None:
    print(f"[{model.stats}{resident()}]", file=sys.stderr)
    if model.stats.advice:
        print(model.stats.advice, file=sys.stderr)


def generate(
    file: File, prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue; -: standard input.")],
    devices: Devices = "auto", context: Context = None, kv: KV = "f16", precision: Precision = "int8",
    memory: Memory = None, split: Split = None, experts: Experts = None, place: Place = None,
    quantize: Quantize = None, repack: Repack = None, max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0, top_k: TopK = 40, top_p: TopP = 0.95,
    min_p: MinP = 0.05, repeat_penalty: Penalty = 1.0, seed: Seed = 0,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="A text that ends the answer. Repeatable.")] = None,
    schema: Schema = None,
) -> None:  # fmt: skip
    """Continue a text with a model."""
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = Sampling(temperature, top_k, top_p, min_p, repeat_penalty, seed)
    held = None if schema is None else _text(schema)
    check_options(max_tokens, sampling, stop or (), schema=held)  # before seconds of loading
    with load(
        _decoder(file), devices, context=context, kv=kv, precision=precision, quantize=quantize, repack=repack,
        **_placement(memory, split, experts, place),
    ) as model:  # fmt: skip
        _written(model.generate(text, max_tokens=max_tokens, sampling=sampling, stop=stop or (), schema=held))
        _report(model)


def chat(
    file: File, devices: Devices = "auto", context: Context = None, kv: KV = "f16", precision: Precision = "int8",
    memory: Memory = None, split: Split = None, experts: Experts = None, place: Place = None,
    quantize: Quantize = None, repack: Repack = None, template: Template = None,
    max_tokens: MaxTokens = 512, temperature: Temperature = 0.8, top_k: TopK = 40, top_p: TopP = 0.95,
    min_p: MinP = 0.05, repeat_penalty: Penalty = 1.0, seed: Seed = 0,
    system: Annotated[str | None, typer.Option("--system", help="What the model is told before the chat.")] = None,
) -> None:  # fmt: skip
    """Chat with a model on the terminal, line by line."""
    sampling = Sampling(temperature, top_k, top_p, min_p, repeat_penalty, seed)
    check_options(max_tokens, sampling)
    with load(
        _decoder(file), devices, context=context, kv=kv, precision=precision, quantize=quantize, repack=repack,
        template=_template(template), **_placement(memory, split, experts, place),
    ) as model:  # fmt: skip
        print(f"{model.plan}\nchat template: {model.template.name}; {CHAT_HELP}", file=sys.stderr)
        first = [] if system is None else [{"role": "system", "content": system}]
        messages = list(first)
        while (line := _line()) is not None:
            if line == "/clear":
                messages = list(first)
            elif line:
                messages.append({"role": "user", "content": line})
                try:
                    answer = _written(model.chat(messages, max_tokens=max_tokens, sampling=sampling))
                except FullContext as error:
                    messages.pop()
                    print(f"{error}\n{CHAT_HELP}", file=sys.stderr)
                    continue
                messages.append({"role": "assistant", "content": answer})
                _report(model)


def _line() -> str | None:
    """The next line of the user; ``None``: there is none, or it ends the chat."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line == "/quit" else line


def embed(
    file: File, texts: Annotated[list[str], typer.Argument(help="Texts; -: the lines of standard input.")],
    devices: Devices = "auto", precision: Precision = "int8",
    pooling: Annotated[str | None, typer.Option("--pooling", help="mean or cls, in place of the model's own.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Embed texts with an encoder; prints how similar they are, or with --json the embeddings."""
    if pooling not in (None, "mean", "cls"):
        raise BoundsError(f"--pooling is mean or cls, not {pooling!r:.60}")
    given = sys.stdin.read().splitlines() if texts == ["-"] else texts
    with load(file, devices, precision=precision, pooling=pooling) as model:  # type: ignore[arg-type]
        begin = perf_counter()
        found = model.embed(given)
        seconds = perf_counter() - begin
        if as_json:
            print_json({"texts": given, "embeddings": found.tolist(), "seconds": seconds})
            return
        alike = found @ found.T
        rows = [Row([Text(str(i + 1)), *(Text(f"{v:.3f}") for v in alike[i]), Text(text[:60])], [])
                for i, text in enumerate(given)]  # fmt: skip
        print_rows(["", *map(str, range(1, len(given) + 1)), "text"], rows, indent=3,
                   footer=f"cosines; {len(given)} texts in {seconds:.2f} s{resident()}")  # fmt: skip


# --- opweave models -------------------------------------------------------------------------------------------------


def info(file: File, as_json: Json = False) -> None:
    """What a model is: nothing but its metadata is read."""
    found = summary(open_model(file))
    if as_json:
        print_json({"path": str(file), **found})
        return
    print_rows(["", str(file)], [Row([Text(key, "cyan"), Text(str(value))], []) for key, value in found.items()],
               indent=3)  # fmt: skip


def plan(
    file: File, devices: Devices = "auto", context: Context = None, kv: KV = "f16", memory: Memory = None,
    split: Split = None, experts: Experts = None, place: Place = None, precision: Precision = "int8",
    quantize: Quantize = None, repack: Repack = None,
    sequences: Annotated[int, typer.Option("--sequences", help="How many sequences at a time.")] = 1,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Where a model would go, and what it would take: nothing is loaded."""
    made: Plan = plan_placement(
        open_model(file), devices, context=context, sequences=sequences, kv=kv, quantize=quantize, repack=repack,
        precision=precision, **_placement(memory, split, experts, place),
    )  # fmt: skip
    if as_json:
        rows = [{"device": s.device, "layers": s.layers, "weights": s.weights, "copies": s.copies, "cache": s.cache,
                 "compute": s.compute + s.host, "budget": s.budget} for s in made.shares]  # fmt: skip
        print_json({"path": str(file), "context": made.context, "kv": made.kv, "devices": rows})
    else:
        print(made)


def _new(path: Path) -> Path:
    if os.path.exists(path):
        raise typer.BadParameter(f"{path} is there already; it is not overwritten")
    writable_file(path)
    return path


def convert(
    file: File,
    out: Annotated[
        Path, typer.Argument(help="The file to write: .gguf, or safetensors by GGUF's names.", callback=_new)
    ],
) -> None:
    """Write a model as one file: GGUF, which llama.cpp reads too, or safetensors with blocks decoded to f32."""
    if out.suffix == ".gguf":
        write_gguf(file, out)
    else:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        opened = open_model(file)
        floats = {name: _floats(opened.tensors[name]) for name in opened.tensors}
        with new_file(out) as part:
            try:
                save_file(floats, part, {"architecture": opened.config.architecture, "source": str(file)})
            except SafetensorError as error:
                raise OSError(error) from None
    print(f"{out}: {human_bytes(out.stat().st_size)}")


def quantize(
    file: File,
    out: Annotated[Path, typer.Argument(help="The GGUF file to write.", callback=_new)],
    kind: Annotated[str, typer.Argument(help="A type of blocks, such as q8_0 or q4_k; f16, bf16 or f32.")],
) -> None:
    """Round a model's matrices to another type, in a new GGUF file; everything else stays as it is."""
    made, wanted = write_gguf(file, out, kind), ow.as_dtype(kind)
    print(f"{out}: {human_bytes(out.stat().st_size)}")
    if wanted.name != "q8_0" and made["q8_0"]:
        print(f"{made['q8_0']} of {made.total()} matrices are in q8_0, since their rows are no whole blocks of "
              f"{wanted.block}, as {wanted} has")  # fmt: skip
    if made[""]:
        print(f"{made['']} of {made.total()} matrices stay as they were: routers, or rows of no whole blocks")


def _floats(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, ow.Blocks):
        return np.asarray(ow.dequantize(value), np.float32)
    return np.ascontiguousarray(value, np.float32)


def bench(
    file: File, devices: Devices = "auto", kv: KV = "f16", precision: Precision = "int8", memory: Memory = None,
    split: Split = None, experts: Experts = None, place: Place = None, repack: Repack = None,
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Tokens of the prompt.")] = 512,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of the answer.")] = 64,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Tokens a second of a prompt and of an answer; over several devices, also of each that holds the model alone."""
    options: dict[str, Any] = {"context": prompt + tokens + 1, "kv": kv, "precision": precision, "repack": repack}
    opened = _decoder(file)
    rows = [measured(load(opened, devices, **options, **_placement(memory, split, experts, place)), prompt, tokens)]
    budgets = {ow.device(name).name: budget for name, budget in _pairs(memory, "memory").items()}
    for name in rows[0]["devices"] if len(rows[0]["devices"]) > 1 else ():
        with suppress(AllocationError):
            given = {name: budgets[name]} if name in budgets else None
            rows.append(measured(load(opened, name, memory=given, **options), prompt, tokens))
    best = max(rows, key=lambda row: float(row["answer"]))
    if as_json:
        print_json({"path": str(file), **rows[0], "alone": rows[1:]})
        return
    for row in rows:
        print(f"{', '.join(row['devices'])}: prompt of {prompt}: {row['prompt']:,.0f} tokens a second; answer of "
              f"{tokens}: {row['answer']:,.1f}")  # fmt: skip
    if best is not rows[0]:
        print(f"{best['devices'][0]} alone is faster: --devices {best['devices'][0]}")


def measured(model: Model, prompt: int, tokens: int) -> dict[str, Any]:
    """Tokens a second of a prompt and of the steps after it, the best of three rounds. Closes the model."""
    with model:
        model.warm()
        ids = np.random.default_rng(0).integers(0, model.config.vocabulary, prompt).tolist()
        best = [max(each) for each in zip(*[rates(model, ids, tokens) for _ in range(3)], strict=True)]
    return {"devices": model.plan.devices, "prompt": best[0], "answer": best[1]}


def rates(model: Model, ids: list[int], steps: int) -> tuple[float, float, float]:
    """Tokens a second of a prompt and of the steps after it, and the slowest step as a multiple of the median."""
    with model.session() as session:
        times, fed = [perf_counter()], ids
        for _ in range(1 + steps):
            session.feed(fed)
            fed = [int(session.logits().argmax())]
            times.append(perf_counter())
    first, *each = np.diff(times).tolist()
    return len(ids) / first, steps / sum(each), max(each) / float(np.median(each))


# --- opweave serve-model --------------------------------------------------------------------------------------------


def serve_model(
    file: File, devices: Devices = "auto", context: Context = None, kv: KV = "f16", precision: Precision = "int8",
    memory: Memory = None, split: Split = None, experts: Experts = None, place: Place = None,
    quantize: Quantize = None, repack: Repack = None, template: Template = None,
    sequences: Annotated[int, typer.Option("--sequences", help="Answers that are computed at a time.")] = 4,
    queue: Annotated[int, typer.Option("--queue", help=QUEUE_HELP)] = 16,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that a request may take.")] = 300.0,
    host: Annotated[str, typer.Option("--host", help="Another address than 127.0.0.1 needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535)] = 8080,
    key: Annotated[str | None, typer.Option("--key", envvar="OPWEAVE_MODEL_KEY", help="What clients send.")] = None,
) -> None:  # fmt: skip
    """Serve a model as OpenAI's endpoints (chat, completions, embeddings, models), with a page to chat."""
    try:
        from opweave_models.batching import check_limits
        from opweave_models.server import listening, serve
    except ImportError:
        raise Unavailable("the server is made of starlette and uvicorn, which are not installed",
                          remedy='pip install "opweave-models[server]"') from None  # fmt: skip
    if host not in ("127.0.0.1", "::1", "localhost") and not key:
        raise BoundsError(f"clients of other machines reach {host}; give a key (--key or OPWEAVE_MODEL_KEY)")
    check_limits(queue, timeout)
    with listening(host, port) as sockets, load(
        file, devices, context=context, kv=kv, precision=precision, quantize=quantize, repack=repack,
        sequences=sequences, template=_template(template), **_placement(memory, split, experts, place),
    ) as model:  # fmt: skip
        print(model.plan, file=sys.stderr)
        serve(model, sockets, host=host, key=key, queue=queue, timeout=timeout)
