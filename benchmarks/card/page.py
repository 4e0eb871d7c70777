"""The results as one page, which needs nothing else."""

from __future__ import annotations

from typing import Any, Final

from jinja2 import Environment

__all__ = ["page"]

_TEMPLATE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>opweave on {{ options.device }}</title>
<style>
 body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; color: #1c2128 }
 table { border-collapse: collapse; margin: .6em 0 1.2em; display: block; overflow-x: auto }
 th, td { padding: .2em .7em; border-bottom: 1px solid #d8dee4; text-align: right; vertical-align: top }
 th { font-weight: 600; background: #f6f8fa } td:first-child { white-space: nowrap }
 .text, td:first-child, th:first-child { text-align: left; max-width: 42em; overflow-wrap: break-word }
 h2 { margin-top: 2em; border-bottom: 2px solid #d8dee4 } h3 { margin-bottom: 0 }
 .passed { color: #1a7f37 } .failed, .crashed, .timed-out { color: #cf222e; font-weight: 600 }
 .not-here, .not-reached, .waiting, .running { color: #7d4e00 }
 pre { background: #f6f8fa; padding: .8em; overflow-x: auto; font-size: 12px }
</style></head><body>
<h1>opweave on {{ options.device }}</h1>
<p>{{ began }}{% if ended %} to {{ ended }}{% else %}, not ended{% endif %}; {{ options.minutes }} minutes, seed
{{ options.seed }}{% if options.short %}, shortest form{% endif %}.</p>
<table><tr><th>part</th><th>result</th><th>seconds</th><th></th></tr>
{% for part in parts %}<tr><td><a href="#{{ part.name }}">{{ part.title }}</a></td>
<td class="{{ part.status | replace(' ', '-') }}">{{ part.status }}</td><td>{{ part.seconds }}</td>
<td class="text">{{ part.why }}</td></tr>{% endfor %}</table>
{% for part in parts %}<h2 id="{{ part.name }}">{{ part.title }}</h2>
<p><span class="{{ part.status | replace(' ', '-') }}">{{ part.status }}</span>
{% if part.why %}: {{ part.why }}{% endif %}</p>
{% if part.failures %}<h3>Failures</h3><table>{% for failure in part.failures %}<tr><td>{{ failure.what }}</td>
<td class="text">{{ failure.why }}</td></tr>{% endfor %}</table>{% endif %}
{% for title, columns, rows in part.tables %}<h3>{{ title }}</h3><table><tr>
{% for column in columns %}<th{% if rows[0][loop.index0].is_text %} class="text"{% endif %}>
{{ column | replace('_', ' ') }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td{% if cell.is_text %} class="text"{% endif %}>{{ cell.text }}</td>
{% endfor %}</tr>{% endfor %}</table>{% endfor %}
{% if part.log %}<h3>The end of its output</h3><pre>{{ part.log }}</pre>{% endif %}
{% endfor %}</body></html>
"""


def page(document: dict[str, Any]) -> str:
    """The page of the results of ``benchmarks/gpu.py``."""
    parts = [{**part, "tables": _tables(part["rows"])} for part in document["parts"]]
    text: str = Environment(autoescape=True).from_string(_TEMPLATE).render({**document, "parts": parts})
    return text


def _tables(rows: list[dict[str, Any]]) -> list[tuple[str, list[str], list[list[dict[str, Any]]]]]:
    """Title, columns and cells of each table of a part."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        tables.setdefault(row["table"], []).append(row)
    found = []
    for title, members in tables.items():
        columns = [name for name in dict.fromkeys(name for row in members for name in row) if name != "table"]
        found.append((title, columns, [[_cell(row.get(name)) for name in columns] for row in members]))
    return found


def _cell(value: Any) -> dict[str, Any]:
    if value is None:
        return {"text": "", "is_text": False}
    if isinstance(value, float):
        return {"text": f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}", "is_text": False}
    if isinstance(value, int) and not isinstance(value, bool):
        return {"text": f"{value:,}", "is_text": False}
    if isinstance(value, dict):
        value = ", ".join(f"{name} {each}" for name, each in value.items())
    return {"text": str(value), "is_text": True}
