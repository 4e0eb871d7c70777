"""Chat templates are rendered as transformers renders them; what it refuses is refused with a typed error."""

from __future__ import annotations

import json
import random
from datetime import datetime

import pytest

import opweave as ow

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
models = pytest.importorskip("opweave_models")

TOOLS = [{"type": "function", "function": {"name": "f<x>", "parameters": {"z": {"é": [1, 2.5, None, True]}, "a": {}}}}]

TEMPLATES = {
    "tools is none": "{% if tools is none %}none{% else %}{{ tools | length }}{% endif %}{{ messages[0].content }}",
    "documents is none": "{{ documents is none }} {{ documents is defined }} {{ documents | default('d') }}",
    "undefined": "{{ custom is defined }} {{ enable_thinking is defined }} {{ add_generation_prompt }} {{ pad_token }}",
    "tojson": "{% for m in messages %}{{ m | tojson }}\n{% endfor %}",
    "tojson of nested values": "{{ {'z': messages, 'a': [none, 1.5, '<&>é😀'], 'n': {'y': 1, 'b': {}}} | tojson }}",
    "tojson of tools": "{% for t in tools or [] %}{{ t | tojson(indent=4) }}\n{% endfor %}{{ tools | tojson }}",
    "tojson with arguments": "{{ messages | tojson(indent=2, separators=(' ,', ' : '), sort_keys=true) }}"
    "{{ messages | tojson(true) }}{{ messages | tojson(ensure_ascii=true, indent='\t') }}",
    "tojson is a plain text": "{{ (messages | tojson) + '<b>' + bos_token }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}<u>{{ m.content }}{% endif %}{% endfor %}",
    "generation with space": "{% for m in messages %}\n    {%- generation -%}\n  {{ m.content }} {{ loop.index }}\n"
    "  {% if loop.last %}last{% endif %}\n{% endgeneration %}\n{% endfor %}\nend",
    "generation has a scope": "{% set x = 'out' %}{% generation %}{{ x }}{% set x = 'in' %}{{ x }}{% endgeneration %}"
    "{{ x }}{% set n = namespace(v=1) %}{% generation %}{% set n.v = 2 %}{% endgeneration %}{{ n.v }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% if loop.index > 3 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "macros": "{% macro turn(m, end='') %}[{{ m.role | upper }}]{{ m.content | trim }}{{ caller() if caller else end }}"
    "{% endmacro %}{% for m in messages %}{{ turn(m, end=eos_token) }}{% call turn(m) %}!{% endcall %}{% endfor %}",
    "strftime_now": "{{ strftime_now('%Y %d') }} {{ strftime_now(format='%B') }} {{ strftime_now is defined }}",
    "strftime_now of no text": "{{ strftime_now(5) }}",
    "raise_exception": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.content }}"
    "{{ m.keys() | list }}{% endfor %}",
    "none values": "{% for m in messages %}{{ m.tool_calls is defined }}{{ m.get('name', 'no') }}{% endfor %}",
    "blocks of spaces": "{%- for m in messages %}\n  {% if 1 %}\n    {{- m.content }}\n  {% endif %}\n{% endfor %}\n",
    "slices": "{{ messages[::-1][0].content[:3] }}{{ messages[1:] | map(attribute='role') | join(',') }}"
    "{% for m in messages %}{{ m.content.split('<')[-1].strip('\\n') }}{{ m['content'] is string }}{% endfor %}",
    "changes nothing": "{{ messages.append(messages[0]) }}",
    "a wrong type": "{{ 5 | dictsort }}",
}  # fmt: skip

TEXTS = [
    "hi <b> & 'q' \"d\" é 😀",
    "  spaced \n",
    "a\n\n{{ 7 * 7 }} {% raw %}",
    "<|im_end|></s>",
    "",
    "<think>x</think>\n\ny",
]
EXTRAS: list[dict[str, object]] = [
    {}, {}, {"reasoning": "so"}, {"thinking": "t", "reasoning_content": "r"}, {"tool_calls": None, "name": None},
    {"tool_calls": [{"function": {"name": "f", "arguments": {"b": "<é>", "a": None}}}]},
]  # fmt: skip


def chats():
    drawn = random.Random(0)
    for _ in range(60):
        first = [{"role": "system", "content": drawn.choice(TEXTS)}] if drawn.random() < 0.3 else []
        roles = [
            "user" if (i % 2 == 0) != (drawn.random() < 0.05) else "assistant" for i in range(drawn.randrange(1, 6))
        ]
        yield first + [{"role": role, "content": drawn.choice(TEXTS), **drawn.choice(EXTRAS)} for role in roles]


@pytest.fixture(scope="module")
def reference(folder):
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def theirs(reference, source, chat, options):
    try:
        return reference.apply_chat_template(chat, chat_template=source, tokenize=False, **options)
    except Exception as error:  # of many kinds
        return type(error)


@pytest.mark.parametrize(
    "options",
    [{}, {"tools": TOOLS, "documents": [{"title": "t", "text": "é"}]}, {"custom": False}],
    ids=["alone", "with tools", "with an option"],
)
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_templates_are_rendered_as_by_transformers(reference, source, options):
    from opweave_models.chat import Template

    template = Template(source, {"bos_token": reference.bos_token, "eos_token": reference.eos_token})
    for chat in chats():
        for prompt in (True, False):
            given = {**options, "add_generation_prompt": prompt}
            expected = theirs(reference, source, chat, given)
            if isinstance(expected, str):
                assert template.render(chat, **given) == expected
            else:
                with pytest.raises(ow.errors.FormatError, match="refuses these messages"):
                    template.render(chat, **given)


@pytest.mark.parametrize("source", [
    "{% generation %}{{ 1 }}", "{{ 1 }}{% endgeneration %}", "{% break %}{{ 1 }}", "{{ " + "9" * 5000 + " }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
], ids=["no end", "no beginning", "no loop", "a long number", "deep"])  # fmt: skip
def test_a_template_that_cannot_be_compiled_is_refused(source):
    from opweave_models.chat import Template

    with pytest.raises(ow.errors.FormatError, match="is not valid"):
        Template(source, {})


@pytest.mark.parametrize("source", [
    "{{ messages.__class__.__name__ }}", "{{ ''.__class__.__mro__ }}", "{{ raise_exception.__globals__.json }}",
    "{{ strftime_now.__globals__.json }}", "{% generation %}{{ messages.__class__.__base__ }}{% endgeneration %}",
    "{{ messages | map(attribute='__class__') | list | tojson }}",
])  # fmt: skip
def test_templates_reach_nothing_of_python(source):
    from opweave_models.chat import Template

    with pytest.raises(ow.errors.FormatError):
        Template(source, {}).render([{"role": "user", "content": "hi"}])


def test_a_folder_names_the_tokens_that_templates_use(tmp_path):
    from tests.support.small_models import make_folder

    make_folder("llama", tmp_path)
    source = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ boi_token }}{{ image_token }}{{ unk_token is defined }}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>",
                "bos_token": {"content": "<s>", "__type": "AddedToken"}, "boi_token": "<|im_start|>", "unk_token": None,
                "extra_special_tokens": {"image_token": "<|im_end|>"}, "chat_template": source}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    chat = [{"role": "user", "content": "hi"}]
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with models.load(tmp_path, "cpu", context=32) as llm:
        made = llm.template.render(chat)
    assert made == reference.apply_chat_template(chat, tokenize=False)
    assert made == "<s></s><pad><|im_start|><|im_end|>False"


def test_the_time_is_that_of_the_rendering(monkeypatch):
    from opweave_models import chat

    template = chat.Template("{{ strftime_now('%Y') }}", {})

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2101, 2, 3)

    monkeypatch.setattr(chat, "datetime", Later)
    assert template.render([{"role": "user", "content": "hi"}]) == "2101"
