"""`Sampling`: how the next token is chosen from logits; `Answer`: an answer as it grows, token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from opweave.errors import BoundsError, ExecutionError, FormatError, Unavailable
from opweave_models.tokenizer import Tokenizer

__all__ = ["Answer", "Piece", "Sampler", "Sampling", "check_options"]

Logits = np.ndarray[Any, np.dtype[np.float32]]
Reason = Literal["stop", "length", "cancelled"]

RECENT: Final = 64
"""Tokens that the repetition penalty looks back at, as llama.cpp does."""


SPACE: Final = r"(| |\n{1,2}[ \t]{0,20})"
"""White space between the parts of JSON, which would else be all that some models write. llama.cpp allows the same."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. The order is llama.cpp's: penalty, top-k, top-p, min-p, temperature.

    The seed gives each place of an answer a random number for each token; the token is chosen for which this and the
    logit have the highest sum (the Gumbel-max trick, which chooses by the probabilities). So equal logits give the same
    text on every device. Logits that differ by rounding give another token only where the two highest sums are that
    near, or one of them is at the limit of top-k, top-p or min-p; the share of such places is about as large as the
    difference of logits, and from there on the texts differ.

    Attributes:
        temperature: divides the logits; 0: always the most likely token.
        top_k: only so many of the most likely tokens; 0: all.
        top_p: only the most likely ones that together reach this probability.
        min_p: only tokens at least so likely, as a share of the most likely one.
        repeat_penalty: logits of the last 64 tokens are divided by it (multiplied, where negative); 1: none.
        seed: of the random numbers.

    Raises:
        BoundsError: a number outside of its range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {"temperature": (0, 100), "top_k": (0, 1 << 31), "top_p": (0, 1), "min_p": (0, 1),
                  "repeat_penalty": (1e-3, 1e3), "seed": (0, 1 << 63)}  # fmt: skip
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise BoundsError(f"sampling: {name} is a number from {low:,} to {high:,}, not {value!r:.60}")
            if name in ("top_k", "seed") and not isinstance(value, int):
                raise BoundsError(f"sampling: {name} is a whole number, not {value!r:.60}")


def check_options(
    max_tokens: int, sampling: Sampling | None = None, stop: str | Sequence[str] = (), logprobs: int | None = None,
    schema: Mapping[str, Any] | str | None = None,
) -> None:  # fmt: skip
    """Check the options of an answer, as of `Session.generate`, without a model.

    Raises:
        BoundsError: an option that is none.
        FormatError, Unavailable: a schema that is none, or that nothing here holds answers to.
    """
    for name, value, least in (("max_tokens", max_tokens, 1), ("logprobs", 0 if logprobs is None else logprobs, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BoundsError(f"{name} is a number from {least}, not {value!r:.60}")
    if not isinstance(sampling, Sampling | None):
        raise BoundsError(f"sampling is a Sampling, not {sampling!r:.60}")
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(text, str) for text in stops):
        raise BoundsError(f"stop is a text or a list of texts, not {stop!r:.60}")
    if schema is not None:
        _Grammar(_Bytes(), schema)


class Sampler:
    """Chooses tokens of one answer; it owns the random numbers, and the schema that the answer is held to."""

    def __init__(self, options: Sampling, tokenizer: Tokenizer, schema: Mapping[str, Any] | str | None = None) -> None:
        self._options: Final = options
        self._random: Final = np.random.default_rng(options.seed)
        self._grammar: Final = None if schema is None else _Grammar(tokenizer, schema)

    def choose(self, logits: Logits, recent: Sequence[int]) -> int:
        """The next token.

        Args:
            logits: of one sequence, f32 of shape (vocabulary,); they are not changed.
            recent: the tokens so far, by which repetition is judged.
        """
        options, scores = self._options, logits
        if options.repeat_penalty != 1 and len(recent):
            scores = scores.copy()
            seen = np.unique(np.asarray(recent[-RECENT:]))
            scores[seen] = np.where(scores[seen] > 0, scores[seen] / options.repeat_penalty,
                                    scores[seen] * options.repeat_penalty)  # fmt: skip
        if self._grammar is not None:
            scores = self._grammar.masked(scores)
        if not np.isfinite(scores.max()):
            raise ExecutionError("no token can be chosen: the logits are not finite")
        token = int(scores.argmax()) if options.temperature == 0 else self._drawn(scores)
        if self._grammar is not None:
            self._grammar.accept(token)
        return token

    @property
    def finished(self) -> bool:
        """The answer is complete by its schema."""
        return self._grammar is not None and self._grammar.stopped

    def _drawn(self, scores: Logits) -> int:
        options, noise = self._options, self._random.random(scores.size)
        ids = np.arange(scores.size) if options.top_k == 0 else most_likely(scores, options.top_k)
        values = scores[ids].astype(np.float64)
        values -= values.max()
        shares = np.exp(values)
        reached = options.top_p * shares.sum()
        # Less likely tokens than this are together less than what top_p leaves out, and need not be sorted.
        kept = shares >= max(options.min_p, (1 - options.top_p) * shares.sum() / shares.size)
        ids, values, shares = ids[kept], values[kept], shares[kept]
        if options.top_p < 1:
            order = np.lexsort((ids, -values))
            order = order[: np.searchsorted(shares[order].cumsum(), reached) + 1]
            ids, values = ids[order], values[order]
        with np.errstate(over="ignore"):  # at temperatures near 0 all but the most likely become -inf
            values /= options.temperature
        return int(ids[np.argmax(values - np.log(-np.log(noise[ids])))])


def most_likely(scores: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The ids of so many of the highest scores, the highest first, the lower id first among equals."""
    count = min(count, scores.size)
    ids = np.flatnonzero(scores >= np.partition(scores, -count)[-count]) if count else np.arange(0)
    return ids[np.lexsort((ids, -scores[ids]))][:count]


class _Bytes:
    """Tokens of one byte each, by which a schema is checked without a model."""

    @property
    def guided(self) -> Any:
        import llguidance

        return llguidance.LLTokenizer("byte")


class _Grammar:
    """Which tokens continue a text that a JSON schema allows, by the library llguidance."""

    def __init__(self, tokenizer: Tokenizer | _Bytes, schema: Mapping[str, Any] | str) -> None:
        try:
            import llguidance
            import llguidance.numpy as masks
        except ImportError:
            raise Unavailable("answers are held to a schema by llguidance, which is not installed",
                              remedy='pip install "opweave-models[json]"') from None  # fmt: skip
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": SPACE})
        except (TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"this is no JSON schema to hold an answer to: {error}") from None
        library = tokenizer.guided
        self._masks: Any = masks
        self._matcher: Any = llguidance.LLMatcher(library, grammar)
        if self._matcher.is_error():
            raise FormatError(f"this is no JSON schema to hold an answer to: {self._matcher.get_error()}")
        self._bits = masks.allocate_token_bitmask(1, library.vocab_size)

    def masked(self, scores: Logits) -> Logits:
        self._masks.fill_next_token_bitmask(self._matcher, self._bits, 0)
        allowed = np.unpackbits(self._bits[0].view(np.uint8), bitorder="little")[: scores.size]
        allowed = np.pad(allowed, (0, scores.size - allowed.size))
        return np.where(allowed.astype(np.bool_), scores, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)

    @property
    def stopped(self) -> bool:
        return bool(self._matcher.is_stopped())


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token adds to an answer.

    Attributes:
        text: the new text; "" within a character of several tokens, or while it may become a stop string.
        token: its id.
        logprob: natural logarithm of its probability, at temperature 1; ``None`` unless asked for.
        top: the most likely tokens there with their logarithms, as many as were asked for.
        reason: why the answer ends with this piece: ``"stop"`` (the model ended it, or a stop string came),
            ``"length"``, ``"cancelled"``; ``None``: it goes on.
    """

    text: str
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    reason: Reason | None = None


class Answer:
    """An answer as it grows: samples, decodes, and finds its end.

    Args:
        tokenizer: of the model.
        sampler: chooses the tokens.
        prompt: ids before the answer.
        max_tokens: after so many it ends.
        stop: texts that end it, and do not belong to it.
        logprobs: how many of the most likely tokens each piece lists; ``None``: no probabilities.
    """

    def __init__(
        self, tokenizer: Tokenizer, sampler: Sampler, prompt: Sequence[int], max_tokens: int,
        stop: str | Sequence[str] = (), logprobs: int | None = None,
    ) -> None:  # fmt: skip
        stops = [stop] if isinstance(stop, str) else stop
        self._tokenizer, self._sampler, self._stop = tokenizer, sampler, tuple(text for text in stops if text)
        self._recent, self._left, self._logprobs = list(prompt), max_tokens, logprobs
        self._stream = tokenizer.stream(prompt)
        self._held = ""

    def accept(self, logits: Logits, *, cancelled: bool = False) -> Piece:
        """The next piece, from the logits that follow the tokens so far; the last one where it was cancelled."""
        token = self._sampler.choose(logits, self._recent)
        self._recent.append(token)
        self._left -= 1
        logprob, top = self._probabilities(logits, token)
        if token in self._tokenizer.ends:
            return Piece(self._held + self._stream.finish(), token, logprob, top, "stop")
        self._held += self._stream.add(token)
        found = min((at for stop in self._stop if (at := self._held.find(stop)) >= 0), default=-1)
        if found >= 0:
            return Piece(self._held[:found], token, logprob, top, "stop")
        reason: Reason | None = "stop" if self._sampler.finished else "length" if self._left <= 0 else None
        reason = "cancelled" if cancelled and reason is None else reason
        if reason is not None:
            return Piece(self._held + self._stream.finish(), token, logprob, top, reason)
        kept = max((n for stop in self._stop for n in range(1, min(len(stop), len(self._held) + 1))
                    if self._held.endswith(stop[:n])), default=0)  # fmt: skip
        given, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return Piece(given, token, logprob, top)

    def _probabilities(self, logits: Logits, token: int) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        if self._logprobs is None:
            return None, ()
        wide = logits.astype(np.float64)
        shift = wide.max() + np.log(np.exp(wide - wide.max()).sum())
        best = most_likely(logits, self._logprobs)
        return float(wide[token] - shift), tuple((int(i), float(wide[i] - shift)) for i in best)
