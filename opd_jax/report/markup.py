"""The page of a report: one HTML file with nothing to load, tables and images inside it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from opd_jax.report.drawing import Plot
from opd_jax.report.tabular import Table

_STYLE = """
:root { --ink: #1d2430; --soft: #5c6675; --line: #e3e7ec; --paper: #ffffff; --tint: #f6f8fa;
        --blue: #0072B2; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--tint); color: var(--ink); line-height: 1.55;
       font: 16px/1.55
             -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 44px 36px 80px; background: var(--paper);
       min-height: 100vh; border-inline: 1px solid var(--line); }
h1 { font-size: 30px; margin: 0 0 2px; letter-spacing: -0.01em; }
h2 { font-size: 21px; margin: 52px 0 6px; padding-top: 18px; border-top: 1px solid var(--line); }
h3 { font-size: 16.5px; margin: 34px 0 2px; }
p { margin: 8px 0; max-width: 78ch; }
.soft, figcaption, .caption { color: var(--soft); font-size: 14.5px; }
.cards { display: grid; gap: 12px; margin: 26px 0 20px;
         grid-template-columns: repeat(auto-fill, minmax(min(100%, 280px), 1fr)); }
.card { border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.card b { display: block; font-size: 25px; letter-spacing: -0.02em; line-height: 1.25;
          font-variant-numeric: tabular-nums; }
.card .label { color: var(--soft); font-size: 13px; }
.card .detail { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.card.first { border-color: var(--blue); box-shadow: 0 0 0 1px var(--blue); }
.lead p { font-size: 17px; }
.note { background: #fff8e6; border-left: 4px solid #E69F00; padding: 9px 14px; border-radius: 4px;
        margin: 10px 0; }
.scroll { overflow-x: auto; margin: 10px 0 6px; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums;
        min-width: 55%; }
th { text-align: right; font-weight: 600; color: var(--soft); border-bottom: 2px solid var(--line);
     padding: 6px 11px; white-space: nowrap; }
td { text-align: right; padding: 6px 11px; border-bottom: 1px solid var(--line);
     white-space: nowrap; }
th.word, td.word { text-align: left; }
th:first-child, td:first-child { padding-left: 4px; }
tbody tr:hover { background: var(--tint); }
figure { margin: 0 0 14px; }
figure img { width: 100%; height: auto; display: block; margin-top: 8px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 8px 22px; font-size: 15px; }
dt { font-weight: 600; }
dd { margin: 0; max-width: 75ch; }
pre { background: var(--tint); border: 1px solid var(--line); border-radius: 6px; padding: 14px;
      overflow-x: auto; font-size: 13px; line-height: 1.45; }
summary { cursor: pointer; color: var(--blue); margin-top: 12px; }
@media (max-width: 640px) { main { padding: 24px 16px; } dl { grid-template-columns: 1fr; } }
@media print { body { background: none; } main { border: 0; padding: 0; }
               figure, table { break-inside: avoid; } }
"""

_PAGE = """{% macro figure(plot) %}<figure>
<h3>{{ plot.title }}</h3>
<figcaption>{{ plot.caption }}</figcaption>
<img src="{{ plot.data_uri }}" alt="{{ plot.title }}. {{ plot.caption }}">
</figure>
{% endmacro %}<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{{ title }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
<p class="soft">{{ subtitle }}</p>
{% if cards %}<div class="cards">
{% for card in cards %}<div class="card{{ ' first' if loop.first }}">
<span class="label">{{ card.label }}</span><b>{{ card.value }}</b>
<span class="detail">{{ card.detail }}</span></div>
{% endfor %}</div>{% endif %}
<div class="lead">{% for sentence in summary %}<p>{{ sentence }}</p>{% endfor %}</div>
{% for note in notes %}<p class="note">{{ note }}</p>{% endfor %}
{% if plots %}{{ figure(plots[0]) }}{% endif %}
{% if tables %}<h2>Numbers</h2>{% endif %}
{% for table in tables %}<h3>{{ table.title }}</h3>
<p class="caption">{{ table.caption }}</p>
<div class="scroll"><table><thead><tr>
{% for cell in table.header %}<th{% if loop.index0 < table.text_columns %} class="word"{% endif %}>
{{- cell }}</th>{% endfor %}
</tr></thead><tbody>
{% for row in table.rows %}<tr>
{% for cell in row %}<td{% if loop.index0 < table.text_columns %} class="word"{% endif %}>
{{- cell }}</td>{% endfor %}
</tr>
{% endfor %}</tbody></table></div>
{% endfor %}
{% if plots[1:] %}<h2>More plots</h2>{% endif %}
{% for plot in plots[1:] %}{{ figure(plot) }}{% endfor %}
{% if definitions %}<h2>Definitions</h2>
<dl>{% for term, meaning in definitions.items() %}<dt>{{ term }}</dt><dd>{{ meaning }}</dd>
{% endfor %}</dl>{% endif %}
{% for heading, text in details.items() %}<details><summary>{{ heading }}</summary>
<pre>{{ text }}</pre></details>
{% endfor %}
</main>
</body>
</html>
"""


def render(
    *,
    title: str,
    subtitle: str,
    cards: Sequence[Mapping[str, str]] = (),
    summary: Sequence[str] = (),
    notes: Sequence[str] = (),
    tables: Sequence[Table] = (),
    plots: Sequence[Plot] = (),
    definitions: Mapping[str, str] | None = None,
    details: Mapping[str, Any] | None = None,
) -> str:
    """The page as HTML text; every given string is escaped.

    Args:
        title: heading of the page.
        subtitle: one soft line below it.
        cards: the headline numbers, each {label, value, detail}; the first one stands out.
        summary: plain sentences, one paragraph each.
        notes: sentences to be shown as warnings.
        tables: in order.
        plots: the first one stands below the summary, the others below the tables.
        definitions: meaning of each term, at the end.
        details: JSON-able values to fold away under their headings.
    """
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_PAGE)
    folded = {
        heading: json.dumps(value, indent=2, ensure_ascii=False)
        for heading, value in (details or {}).items()
    }
    return page.render(
        title=title,
        subtitle=subtitle,
        cards=cards,
        summary=summary,
        notes=notes,
        tables=tables,
        plots=plots,
        definitions=definitions or {},
        details=folded,
        style=_STYLE,
    )
