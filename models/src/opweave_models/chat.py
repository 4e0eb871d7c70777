"""`Template`: messages of a chat as the prompt that the model was trained on, by its own Jinja template, sandboxed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from opweave.errors import FormatError

__all__ = ["BUILT_IN", "Message", "Template"]

Message = Mapping[str, Any]
"""``{"role": "user" | "assistant" | "system", "content": text}``."""

BUILT_IN: Final = {
    "gemma": (
        "{{ bos_token }}{% set system = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}"
        "{% for m in messages if m['role'] != 'system' %}<start_of_turn>"
        "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
        "{{ (system if loop.first else '') + m['content'] | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "plain": "{{ bos_token }}{% for m in messages %}{{ m['content'] | trim }}\n\n{% endfor %}",
}
"""Templates for files that have none, by name; ``plain`` for models that were not trained on chats."""

LONGEST: Final = 1 << 20
"""Letters of the longest template that is compiled."""

REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""The names under which clients send what a model thought; templates read one of the first two."""


class Template:
    """A chat template, rendered as transformers does.

    Args:
        source: Jinja, as Hugging Face's ``tokenizer_config.json`` and GGUF have it.
        tokens: ``bos_token``, ``eos_token`` and what else it may use, by name.
        name: what it is, for messages and reports.

    Raises:
        FormatError: it is no valid template, or too long.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], name: str = "the model's own") -> None:
        self.name: Final = name
        self._tokens: Final = dict(tokens)
        if not isinstance(source, str) or not ("{{" in source or "{%" in source):
            raise FormatError(f"a chat template ({name}) is Jinja, or {', '.join(BUILT_IN)}, not {source!r:.60}")
        if len(source) > LONGEST:
            raise FormatError(f"a chat template of {len(source):,} letters; the longest allowed is {LONGEST:,}")
        extensions = [Generation, loopcontrols]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        environment.filters["tojson"] = _to_json
        try:
            self._template: Final = environment.from_string(source)
        except (TemplateSyntaxError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise FormatError(f"the chat template ({name}) is not valid: {error}") from None

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """The prompt, up to where the model answers.

        Raises:
            FormatError: messages that are none, or that the template refuses.
        """
        for message in messages if isinstance(messages, Sequence) else [messages]:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not isinstance(
                message.get("content"), str
            ):  # fmt: skip
                raise FormatError(f"a message is {{'role': text, 'content': text}}, not {message!r:.80}")
        if not messages:
            raise FormatError("a chat has at least one message")
        given = {"add_generation_prompt": True, "tools": None, "documents": None, **self._tokens, **options}
        try:
            return self._template.render(given, messages=[_named(message) for message in messages])
        except (
            TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError,
            MemoryError,
        ) as error:  # fmt: skip
            raise FormatError(f"the chat template ({self.name}) refuses these messages: {error}") from None


class Generation(Extension):
    """``{% generation %}`` marks what a model is trained to write; here its body is rendered, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Scope:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _refuse(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own escapes for HTML and sorts keys."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _named(message: Message) -> dict[str, Any]:
    """A message without values that are ``None``, with what the model thought under the names that templates read."""
    made = {key: value for key, value in message.items() if value is not None}
    thought = next((made[name] for name in REASONING if name in made), None)
    return made if thought is None else {"thinking": thought, **made, "reasoning_content": thought}
