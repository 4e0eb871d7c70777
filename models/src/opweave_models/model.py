"""`load`: a model on its devices; `Model`, `Session`: prompts fed in chunks, answers piece by piece, embeddings."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from operator import eq, index
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import opweave as ow
from opweave.collector import collector_paused
from opweave.errors import BoundsError, Cancelled, FormatError, LifetimeError, UnknownNameError, UnsupportedOpError
from opweave.graph.leaf import Spec
from opweave.progress import shown
from opweave.scheduler import PlannedGraph
from opweave.scheduler.place.precision import checked_precision
from opweave_models.alone import Alone
from opweave_models.config import Pooling
from opweave_models.decoder import decode, empty_cache
from opweave_models.encoder import batch_shape, encode
from opweave_models.files import ModelFile, Stacked, open_model, rounded
from opweave_models.placement import Plan, loaded_type, plan_placement, step_graph
from opweave_models.sampling import Answer, Logits, Piece, Sampler, Sampling, check_options
from opweave_models.tokenizer import VOCABULARY, Tokenizer, read_tokenizer

if TYPE_CHECKING:
    from opweave_models.chat import Message, Template

__all__ = ["FullContext", "Model", "Session", "Stats", "load", "planned"]

CHUNK: Final = 512
"""Tokens of a prompt that one step computes: enough for products of matrices, and a bound for temporary values."""


class FullContext(BoundsError):
    """Tokens for which a context has no room."""


def load(
    path: str | os.PathLike[str] | ModelFile,
    devices: Sequence[str] | str = "auto",
    *,
    context: int | None = None,
    kv: str = "f16",
    sequences: int = 1,
    precision: Any = "int8",
    quantize: str | None = None,
    memory: Mapping[str, int | str] | None = None,
    split: Sequence[float] | None = None,
    experts: str | None = None,
    patterns: Mapping[str, str] | None = None,
    repack: int | str | None = None,
    template: str | None = None,
    pooling: Pooling | None = None,
) -> Model:
    """Open a model and put it on its devices.

    Args:
        path: a GGUF file, one of its shards, a Hugging Face folder, or what `open_model` returned.
        devices: names, the preferred one first; ``"auto"``: graphics cards, then the CPU.
        context: tokens of the longest sequence; by default what the model was made for, at most 4,096.
        kv: dtype of keys and values: f32, f16, bf16, q8_0 or q4_0.
        sequences: how many sequences at a time, as of several clients.
        precision: how roughly products may be computed, as of `opweave.compile`: ``"int8"`` rounds activations beside
            weights that are quantized or in bf16, as llama.cpp does; ``"exact"`` does not; ``"bf16"`` rounds all
            operands where a device has kernels for that.
        quantize: round matrices that are stored as floats to this type while loading, such as ``"q4_k"`` or ``"f16"``.
        memory, split, experts, patterns: as of `plan_placement`.
        repack: bytes (``"2GiB"``) that copies of weights in forms with which a device's kernels are faster may take on
            each device: packed by oneDNN or ONNX Runtime, decoded. On ``torch:cpu`` they take up to eight times the
            bytes of weights in blocks of 4 bits, and steps without them several times as long. ``None``: so many that
            a decoder takes at most 1.5 times the bytes of its weights; of an encoder all. `Plan` says how many before.
        template: a chat template, in place of the model's own: Jinja, or ``"gemma"``, ``"chatml"`` or
            ``"plain"``: messages as they are, for models that were not trained on chats.
        pooling: of an encoder, in place of its own: ``"mean"`` or ``"cls"``.

    Raises:
        FormatError: the model is damaged or lacks something; a template that is none.
        UnknownNameError: an architecture, device, dtype, precision or pooling that does not exist.
        AllocationError: it does not fit.
        BoundsError: a context or number of sequences below 1, or a context beyond what the model was made for.
        LayoutError: a type of keys and values whose blocks heads do not fill.
        SchedulerError: a precision that is neither a name nor a mapping, or a device that is named twice.
    """
    if pooling not in (None, "mean", "cls"):
        raise UnknownNameError("pooling", str(pooling)[:60], ("mean", "cls"), listed=True)
    checked_precision(precision)
    with collector_paused():  # a vocabulary and a graph are many objects that stay
        file = path if isinstance(path, ModelFile) else open_model(path)
        plan = plan_placement(
            file, devices, context=context, sequences=sequences, kv=kv, chunk=CHUNK, memory=memory, split=split,
            experts=experts, patterns=patterns, repack=repack, precision=precision, quantize=quantize,
        )  # fmt: skip
        return Model(file, plan, precision, quantize, template, pooling)


@dataclass
class Stats:
    """What the latest answer took.

    Attributes:
        prompt_tokens, tokens: of the prompt (those that had to be computed) and of the answer.
        prompt_seconds: until the logits of the first token were there.
        seconds: from then on.
        advice: which device would be faster alone, where that was found while it was generated (`Plan.advice`).
    """

    prompt_tokens: int = 0
    tokens: int = 0
    prompt_seconds: float = 0.0
    seconds: float = 0.0
    advice: str = ""

    def __str__(self) -> str:
        prompt = self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0
        steps = max(0, self.tokens - 1)
        rate = steps / self.seconds if self.seconds and steps else 0.0
        return (f"{self.prompt_tokens} tokens of prompt in {self.prompt_seconds:.2f} s ({prompt:,.0f} a second), "
                f"{self.tokens} tokens of answer, {rate:,.1f} a second")  # fmt: skip


class Model:
    """A model on its devices. Made by `load`. One step runs at a time; calls from several threads wait.

    Attributes:
        file, config: what was opened, without the vocabulary, which the tokenizer has.
        plan: where it lies; ``print(model.plan)``. Over several devices it tells after some steps if one of them would
            be faster alone.
        tokenizer: text to ids.
        weights: the weights by GGUF's names.
        cache: keys and values of the sequences; ``None`` of an encoder, and of a model that was closed.
        step: the compiled function of a step; ``None`` of an encoder.
        stats: of the latest answer.
    """

    def __init__(
        self, file: ModelFile, plan: Plan, precision: Any, quantize: str | None, template: str | None,
        pooling: Pooling | None,
    ) -> None:  # fmt: skip
        self.config, self.plan = file.config, plan
        self.tokenizer: Final[Tokenizer] = read_tokenizer(file)
        kept = {key: value for key, value in file.metadata.items() if key not in VOCABULARY}
        self.file: Final = replace(file, metadata=kept)
        self.stats = Stats()
        self.lock: Final = threading.RLock()
        self._template = template
        if template is not None:
            _ = self.template  # raises where it is none, before weights are rounded and copied
        self.weights: Final = ow.weights(_quantized(file, quantize, plan), dict(plan.placed) or None)
        self.file.release()
        self._pooling: Final = pooling or self.config.pooling
        self._closed = False
        self._kept: list[int] = []  # ended sequences, whose beginnings may come again; the longest unused first
        self._run_before: Final[set[tuple[int, ...]]] = set()
        # Where weights are computed with as they lie in the file, its pages stay.
        self._copies: Final = any(
            share.replaced or not ow.device(share.device).default_buffer_type.is_host for share in plan.shares
        )
        devices = [*plan.devices, *(["host"] if "host" not in plan.devices else [])]
        repack = {share.device: True if share.repack == inf else int(share.repack) for share in plan.shares}
        scheduler = ow.Scheduler(devices, repack=repack, precision=precision)
        # Else each longer context would add to what the one before took.
        beside = sum(share.host for share in plan.shares)
        scheduler.reserve(sizes={"host": beside, **{share.device: share.compute for share in plan.shares}})
        self.cache: ow.KVCache | None = None
        self._alone: Alone | None = None
        if self.config.causal:
            if plan.placed:
                self._alone = Alone(plan, self.config, self.weights, scheduler.streams)
            self.cache = empty_cache(self.config, plan.sequences, plan.context, plan.kv, plan.layers, bool(plan.placed))
            self.step: Any = ow.compile(self.graph, devices=scheduler)
        else:
            self.step = ow.compile(self._encoded, devices=scheduler)

    def __repr__(self) -> str:
        return f"<Model {self.config.architecture} {self.config.name!r} on {', '.join(self.plan.devices)}>"

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the programs, the keys and values, and the memory that was allocated for weights."""
        with self.lock:
            if not self._closed:
                self._closed, self.cache = True, None
                self.step.close()

    def graph(
        self, tokens: ow.Tensor, positions: ow.Tensor, slots: ow.Tensor, blocks: ow.Tensor, last: ow.Tensor, reach: int
    ) -> ow.Tensor:
        """The graph of a step: logits, from the arguments that `opweave.KVCache.feed` gives."""
        cache, context = self.decoder_cache(), self.plan.context
        return decode(self.config, self.weights, cache, context, tokens, positions, slots, blocks, last, reach)

    def _encoded(self, tokens: ow.Tensor, mask: ow.Tensor) -> ow.Tensor:
        return encode(self.config, self.weights, tokens, mask, self._pooling)

    # --- steps ------------------------------------------------------------------------------------------------------

    def warm(self, tokens: int | None = None) -> None:
        """Build the programs of single steps for all contexts up to so many tokens (all), with a bar of progress, so
        that no step later waits for it. Raises `BoundsError` for a number below 1."""
        cache = self.decoder_cache()
        if tokens is not None and (not isinstance(tokens, int) or tokens < 1):
            raise BoundsError(f"a context has at least one token, not {tokens!r:.60}")
        reaches = [r for i, r in enumerate(cache.reaches) if not i or cache.reaches[i - 1] < (tokens or r)]
        rows = sorted({1, self.plan.sequences})
        with self.lock:
            self.step.warm([cache.specs(n, 1, reach) for reach in reaches for n in rows])

    def advance(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Logits]:
        """Feed the next tokens of sequences, in chunks, and return the logits that follow each.

        Raises:
            BoundsError: a sequence would be longer than the context, or is not in use, or a token is none; nothing has
                changed.
            LifetimeError: the model was closed.
        """
        cache = self.decoder_cache()
        tokens = {sequence: self.token_ids(ids) for sequence, ids in tokens.items()}
        for sequence, ids in tokens.items():
            if sequence in self._kept or sequence not in range(len(cache.lengths)):
                raise BoundsError(f"sequence {sequence!r:.60} is not in use; join() gives one")
            self.check_room(int(cache.lengths[sequence]), len(ids))
        found: dict[int, Logits] = {}
        with self.lock:
            long = [sequence for sequence, ids in tokens.items() if len(ids) > 1]
            for sequence in long:  # prompts alone: others would be padded to their length
                ids = tokens[sequence]
                for at in range(0, len(ids), CHUNK):
                    found[sequence] = self._run({sequence: ids[at : at + CHUNK]})[sequence]
            single = {sequence: ids for sequence, ids in tokens.items() if len(ids) == 1}
            if single:
                found |= self._run(single)
        return found

    def _run(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Logits]:
        cache = self.decoder_cache()
        before = {sequence: int(cache.lengths[sequence]) for sequence in tokens}
        batch = cache.feed(tokens)
        shape = *batch.tokens.shape, batch.reach
        try:
            run = partial(self.step, *batch)
            logits = run() if self._alone is None else self._alone.run(shape, run)
        except BaseException:
            for sequence, length in before.items():
                try:
                    cache.truncate(sequence, length)
                except BoundsError:  # a ring has forgotten what came before: the sequence is computed anew
                    cache.truncate(sequence, 0)
            raise
        if self._alone is not None and self._alone.done:
            advice, self._alone = self._alone.advice, None
            if advice:
                self.plan, self.stats.advice = replace(self.plan, advice=advice), advice
        if self._copies and (shape[1] > 1 or shape not in self._run_before):
            # Weights were copied, or a prompt read them in another way than the steps that follow.
            self._run_before.add(shape)
            self.file.release()
        return {sequence: logits[batch.rows[sequence]] for sequence in tokens}

    # --- sequences --------------------------------------------------------------------------------------------------

    def join(self, prompt: Sequence[int] = ()) -> int:
        """The number of a new sequence for a prompt, with as many of its tokens, though never the last, as another one
        has computed, in use or kept: ``prompt[cache.lengths[number]:]`` is left to compute.

        A ring has only the last tokens of a sequence that is longer than a window, so that such a one serves where the
        prompt begins with all of it, but for its last token.

        Raises:
            BoundsError: all sequences are in use.
        """
        with self.lock:
            cache = self.decoder_cache()
            found: dict[int, int] = {}
            for sequence in np.flatnonzero(cache.lengths).tolist():
                tokens = cache.tokens(sequence)
                count = [*map(eq, tokens, prompt[:-1]), False].index(False)
                if count >= cache.shortest(sequence):
                    found[sequence] = count
            best = max(found, key=lambda sequence: (found[sequence], sequence in self._kept), default=None)
            if best is None or not found[best]:
                self.free_place()
                return cache.join()
            whole = found[best] >= cache.lengths[best] - 1
            if best in self._kept and (whole or (best == self._kept[0] and not cache.free_sequences)):
                self._kept.remove(best)
                cache.truncate(best, found[best])
                return best
            self.free_place()
            return cache.fork(best, found[best])

    def free_place(self) -> None:
        """Forget the sequence that was kept longest, where no other place is free. Its blocks go with it: there are so
        many that none is missing where there is a place."""
        cache = self.decoder_cache()
        if self._kept and not cache.free_sequences:
            cache.release(self._kept.pop(0))

    def release(self, sequence: int) -> None:
        """End a sequence. What it computed is kept until its place is needed, for others that begin as it does."""
        with self.lock:
            if self._closed:
                return
            cache = self.decoder_cache()
            if cache.lengths[sequence]:
                self._kept.append(sequence)
            else:
                cache.release(sequence)

    def decoder_cache(self) -> ow.KVCache:
        """The cache; raises `LifetimeError` where the model was closed, `UnsupportedOpError` of an encoder."""
        if self._closed:
            raise LifetimeError(f"{self!r} was closed")
        self.config.check_decoder()
        assert self.cache is not None
        return self.cache

    @property
    def label(self) -> str:
        """What tells the keys of this model from those of others, also of itself in a context that rotates them by
        other factors (LongRoPE)."""
        ropes = (self.config.rope, self.config.rope_local)
        longer = any(r is not None and r.factors_long and self.plan.context > r.original_context for r in ropes)
        return self.file.label + " long" * longer

    def token_ids(self, ids: Sequence[int]) -> list[int]:
        """Ids as a list; raises `BoundsError` for what is no token."""
        try:
            found = [index(token) for token in ids]
        except TypeError:
            found = [-1]
        if any(not 0 <= token < self.config.vocabulary for token in found):
            raise BoundsError(f"tokens are ids from 0 to {self.config.vocabulary - 1:,}, not {ids!r:.60}")
        return found

    # --- texts ------------------------------------------------------------------------------------------------------

    @property
    def template(self) -> Template:
        """The chat template: the one given to `load`, the model's own, or Gemma's for a Gemma without one.

        Raises:
            FormatError: there is none, or it is not valid.
        """
        # Importing Jinja takes a twentieth of the time to a first token, which needs no template.
        from opweave_models.chat import BUILT_IN, Template

        names = {"bos_token": self.tokenizer.bos, "eos_token": self.tokenizer.eos}
        tokens = {name: "" if token is None else self.tokenizer.piece(token) for name, token in names.items()}
        extra = self.file.metadata.get("extra_special_tokens")
        for name, value in {**self.file.metadata, **(extra if isinstance(extra, Mapping) else {})}.items():
            text = value.get("content") if isinstance(value, Mapping) else value
            if name.endswith("_token") and isinstance(text, str):  # as transformers passes those of a folder
                tokens[name] = text
        if self._template is not None:
            return Template(BUILT_IN.get(self._template, self._template), tokens, "as given")
        if self.file.chat_template is not None:
            return Template(self.file.chat_template, tokens, f"of {self.file.path}")
        if self.config.architecture.startswith("gemma"):
            return Template(BUILT_IN["gemma"], tokens, "gemma's, since the file has none")
        raise FormatError(f"{self.file.path} has no chat template; give one (template=), such as 'chatml', or continue "
                          "plain text with generate")  # fmt: skip

    def check_room(self, tokens: int, more: int) -> None:
        """Raise `FullContext` where a sequence of so many tokens has no room for so many more."""
        if tokens + more > self.plan.context:
            raise FullContext(f"{tokens} tokens and {more} more are beyond the context of {self.plan.context}; load "
                              "the model with a larger context=")  # fmt: skip

    def answer(
        self, prompt: Sequence[int], max_tokens: int, sampling: Sampling | None, stop: str | Sequence[str] = (),
        logprobs: int | None = None, schema: Mapping[str, Any] | str | None = None,
    ) -> Answer:  # fmt: skip
        """An answer behind a prompt, of which no token is there yet. Arguments as of `Session.generate`.

        Raises:
            BoundsError: there is nothing to continue, or an option is none.
            FullContext: there is no room for a token.
            FormatError, Unavailable: a schema that is none, or that nothing here holds answers to.
        """
        if not prompt:
            raise BoundsError("there is nothing to continue; feed a text first")
        check_options(max_tokens, sampling, stop, logprobs)  # `Sampler` checks the schema
        self.check_room(len(prompt), 1)
        sampler = Sampler(sampling or Sampling(temperature=0), self.tokenizer, schema)
        most = min(max_tokens, self.plan.context - len(prompt))
        return Answer(self.tokenizer, sampler, prompt, most, stop, logprobs)

    def session(self, prompt: Sequence[int] = ()) -> Session:
        """A new sequence, which begins with ids; ``with model.session() as s: ...``. Of the ids only those are computed
        that no other sequence has, in use or ended. Raises `BoundsError` where none is free."""
        ids = self.token_ids(prompt)
        self.check_room(0, len(ids))
        session = Session(self, self.join(ids))
        session.tokens += ids
        return session

    def restore(self, path: str | os.PathLike[str]) -> Session:
        """A session with the sequence that `Session.save` wrote, on any devices.

        Raises:
            OSError: it cannot be read.
            FormatError: the file is damaged, no saved sequence, or of another model.
            ShapeError, BoundsError: as of `opweave.KVCache.restore`.
        """
        with self.lock:
            cache = self.decoder_cache()
            self.free_place()
            session = Session(self, cache.restore(path, self.label))
            session.tokens = cache.tokens(session.sequence)
            if session.tokens:
                # The last token is computed again, for its logits.
                cache.truncate(session.sequence, len(session.tokens) - 1)
        return session

    def generate(self, prompt: str, *, max_tokens: int = 256, sampling: Sampling | None = None, **options: Any) -> Any:
        """Continue a text: an iterator of `Piece`. Options as of `Session.generate`."""
        with self.session(self.tokenizer.encode(prompt)) as session:
            yield from session.generate(max_tokens, sampling, **options)

    def chat(
        self, messages: Sequence[Message], *, max_tokens: int = 512, sampling: Sampling | None = None, **options: Any
    ) -> Iterator[Piece]:
        """Answer a chat: an iterator of `Piece`. Options as of `Session.generate`."""
        with self.session(self.chat_ids(self.template.render(messages))) as session:
            yield from session.generate(max_tokens, sampling, **options)

    def chat_ids(self, prompt: str) -> list[int]:
        """The ids of a rendered template, which often writes the token that begins a text itself."""
        ids = self.tokenizer.encode(prompt, special=False)
        bos = self.tokenizer.bos
        return [bos, *ids] if self.tokenizer.add_bos and bos is not None and ids[:1] != [bos] else ids

    def embed(
        self, texts: str | Sequence[str], *, normalize: bool = True, cancelled: Callable[[], bool] | None = None
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Embeddings of texts by an encoder, f32 of shape (texts, width).

        Args:
            texts: each is cut to the model's context; a single one is a list of one.
            normalize: to length 1.
            cancelled: asked before each text becomes tokens, and before each step of up to 32 texts; ``None``: never.

        Raises:
            BoundsError: what is no text.
            Cancelled: ``cancelled`` was true.
            LifetimeError: the model was closed.
            UnsupportedOpError: the model is a decoder, or neither it nor `load` says how tokens are pooled.
        """
        return self.embed_counted(texts, normalize=normalize, cancelled=cancelled)[0]

    def embed_counted(
        self, texts: str | Sequence[str], *, normalize: bool = True, cancelled: Callable[[], bool] | None = None
    ) -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
        """What `embed` returns, and how many tokens the texts have before they are cut."""

        def check(left: int) -> None:
            if cancelled is not None and cancelled():
                raise Cancelled(f"embedding was cancelled with {left} of {len(texts)} texts left")

        if self.config.causal:
            raise UnsupportedOpError(f"{self.config.architecture} is a decoder; texts are embedded by bert, nomic-bert")
        if self._closed:
            raise LifetimeError(f"{self!r} was closed")
        if self._pooling == "none":
            raise UnsupportedOpError(f"{self.file.path} does not say how to pool; load it with pooling='mean' or 'cls'")
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, Sequence):
            raise BoundsError(f"texts are a list of str, not {texts!r:.60}")
        found = np.zeros((len(texts), self.config.width), np.float32)
        whole = list[list[int]]()
        for text in texts:
            check(len(texts))
            whole.append(self.tokenizer.encode(text))
        ids = [self._cut(each) for each in whole]
        left = sorted(range(len(texts)), key=lambda i: -len(ids[i]))
        while left:
            check(len(left))
            count, length = batch_shape(len(left), len(ids[left[0]]), self.plan.context)
            rows = left[:count]
            tokens, mask = np.zeros((count, length), np.int64), np.zeros((count, length), np.bool_)
            mask[:, 0] = True
            for row, i in enumerate(rows):
                tokens[row, : len(ids[i])], mask[row, : len(ids[i])] = ids[i], True
            with self.lock:
                check(len(left))  # others may have computed for long
                found[rows] = self.step(tokens, mask)[: len(rows)]
            left = left[count:]
        if normalize:
            found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        return found, sum(map(len, whole))

    def _cut(self, ids: list[int]) -> list[int]:
        most = self.plan.context
        return ids if len(ids) <= most else [*ids[: most - 1], ids[-1]]


class Session:
    """One sequence of a model: text is fed, answers are generated, and it goes on. Made by `Model.session`.

    Attributes:
        model: whose.
        tokens: ids so far, those of answers too.
        sequence: its number in the model's cache.
    """

    def __init__(self, model: Model, sequence: int) -> None:
        self.model, self.tokens, self.sequence = model, list[int](), sequence
        self._open = True
        self._logits: Logits | None = None
        self._cancelled = threading.Event()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the sequence: its place is free for another one."""
        if self._open:
            self._open = False
            self.model.release(self.sequence)

    def feed(self, text: str | Sequence[int]) -> None:
        """Append a text (the first one with the token that begins texts) or ids. It is computed at the next answer."""
        self._check_open()
        encode = self.model.tokenizer.encode
        ids = encode(text, special=not self.tokens) if isinstance(text, str) else self.model.token_ids(text)
        self.model.check_room(len(self.tokens), len(ids))
        self.tokens += ids

    def logits(self) -> Logits:
        """Compute what was fed and return the logits that follow, f32 of shape (vocabulary,)."""
        return self._computed()

    def fork(self) -> Session:
        """A second session that begins as this one is now; what was fed is computed once. Raises `BoundsError` where no
        sequence is free."""
        with self.model.lock:
            self._compute()
            self.model.free_place()
            other = Session(self.model, self.model.decoder_cache().fork(self.sequence))
        other.tokens, other._logits = self.tokens.copy(), self._logits
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the sequence to a file, for `Model.restore`, also in another process and on other devices. Raises
        `OSError` where it cannot be written."""
        with self.model.lock:
            self._compute()
            self.model.decoder_cache().save(self.sequence, path, self.model.label)

    def cancel(self) -> None:
        """End the answer that is being generated, from any thread: with its next token or chunk of a prompt."""
        self._cancelled.set()

    def generate(
        self, max_tokens: int = 256, sampling: Sampling | None = None, *, stop: str | Sequence[str] = (),
        logprobs: int | None = None, schema: Mapping[str, Any] | str | None = None,
    ) -> Iterator[Piece]:  # fmt: skip
        """Continue the sequence: pieces as they come. The tokens become part of it.

        Args:
            max_tokens: of the answer, at most; it also ends at the end of the context.
            sampling: how tokens are chosen; ``None``: the most likely one.
            stop: texts that end the answer, and do not belong to it.
            logprobs: how many of the most likely tokens each piece lists with their probabilities.
            schema: a JSON schema that the answer is held to (needs ``opweave-models[json]``).

        Raises:
            BoundsError: there is nothing to continue, or no room in the context.
            Cancelled: the answer was cancelled before its first token; what is left of the prompt is computed the next
                time.
        """
        model = self.model
        answer = model.answer(self.tokens, max_tokens, sampling, stop, logprobs, schema)
        self._cancelled.clear()
        begin, known = perf_counter(), self._known
        logits = self._computed(self._cancelled)
        first = perf_counter()
        model.stats = stats = Stats(len(self.tokens) - known, 0, first - begin)
        while True:
            piece = answer.accept(logits, cancelled=self._cancelled.is_set())
            stats.tokens, stats.seconds = stats.tokens + 1, perf_counter() - first
            if piece.token not in model.tokenizer.ends:
                self.tokens.append(piece.token)
            yield piece
            if piece.reason is not None:
                return
            logits = self._computed()

    @property
    def _known(self) -> int:
        """Tokens whose keys and values the cache has."""
        return int(self.model.decoder_cache().lengths[self.sequence])

    def _compute(self, cancelled: threading.Event | None = None) -> None:
        """Compute what was fed."""
        self._check_open()
        while new := self.tokens[self._known : self._known + CHUNK]:
            if cancelled is not None and cancelled.is_set():
                raise Cancelled("the answer was cancelled before its first token")
            self._logits = self.model.advance({self.sequence: new})[self.sequence]

    def _check_open(self) -> None:
        """Raise `LifetimeError` where the session or its model was closed."""
        if not self._open:
            raise LifetimeError("this session was closed")
        self.model.decoder_cache()

    def _computed(self, cancelled: threading.Event | None = None) -> Logits:
        self._compute(cancelled)
        if self._logits is None:
            raise BoundsError("there is nothing to continue; feed a text first")
        return self._logits


@contextmanager
def planned(path: Path, devices: Sequence[Any], length: int) -> Iterator[PlannedGraph]:
    """The graph of a prompt of ``length`` tokens, or of a text of that many for an encoder, placed on devices without
    memory: nothing is computed. ``path`` may be the ``config.json`` of a folder. Raises what `open_model` does, and
    `BoundsError` for a length that the model does not have."""
    file = open_model(path.parent if path.name == "config.json" else path)
    config = file.config
    if not isinstance(length, int) or not 1 <= length <= config.context:
        raise BoundsError(f"this model was made for 1 to {config.context:,} tokens, not {length!r:.60}")
    weights = ow.weights({name: Spec(value.shape, value.dtype) for name, value in file.tensors.items()})
    context = max(length, min(config.context, 4096))
    cache = empty_cache(config, 1, context) if config.causal else None
    reach = length if cache is None else next(reach for reach in cache.reaches if reach >= length)
    tokens = length if cache is None else 1 << (length - 1).bit_length()  # as steps are padded
    output = step_graph(config, weights, cache, context, 1, tokens, reach)
    with ow.Scheduler(devices) as scheduler:
        yield scheduler.partition(output)


def _quantized(file: ModelFile, quantize: str | None, plan: Plan) -> dict[str, Any]:
    """The tensors, floats of matrices rounded to another type where that was asked for. Those of experts that are not
    in the file as they are used go to devices with memory of their own one by one, and leave the host."""
    made: dict[str, Any] = {}
    for name in file.tensors if quantize is None else shown(list(file.tensors), "quantizing"):
        value = file.tensors[name]
        kind = None if quantize is None else loaded_type(name, value, quantize)
        if isinstance(value, np.ndarray) and value.ndim < 2:  # else a step would read pages around it from the file
            value = np.array(value)
        made[name] = value if kind is None else rounded(name, value, kind)
        device = ow.device(plan.placed.get(name, plan.devices[0]))
        if (len(value.shape) > 2 and (kind is not None or isinstance(value, Stacked))
                and not device.default_buffer_type.is_host):  # fmt: skip
            made[name] = ow.weights({name: made[name]}, device)[name]
            made[name].leaf.data = None
    return made
