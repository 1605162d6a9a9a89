"""Self-contained HTML pages: text, tables and plots in one file that includes plotly's JavaScript.

The data that a page shows is also in it as JSON, in the element with the id "data".
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from typing import Any

from mkernel.runtime.errors import MKernelError
from mkernel.version import __version__

# Distinguishable with color vision deficiency
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#777777")

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 68rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; }
table { border-collapse: collapse; font-size: 0.9rem; } .wide { overflow-x: auto; }
th, td { border-bottom: 1px solid #ddd; padding: 0.25rem 0.7rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.plot { width: 100%; height: 24rem; } .small { color: #666; font-size: 0.9rem; }
.wrong { color: #b00020; font-weight: bold; } .emulated { background: #fff3cd; padding: 0.1rem 0.4rem; }
"""


# no button that would upload the figures
BUTTONS = {"responsive": True, "displaylogo": False, "showSendToCloud": False, "plotlyServerURL": ""}


# the keys of a trace whose values plotly shows as text
TEXTS = ("name", "text", "x", "y")


def plot(name: str, traces: Sequence[dict[str, Any]], title: str, x: str, y: str, **layout: Any) -> str:
    """A plot that plotly's JavaScript draws from traces (dictionaries of lists). Names and labels are plain text and
    may contain line breaks. The element has no id; its data-plot attribute is the name."""
    full = {
        "title": {"text": _label(title)},
        "xaxis": {"title": {"text": _label(x)}, **layout.pop("xaxis", {})},
        "yaxis": {"title": {"text": _label(y)}, **layout.pop("yaxis", {})},
        "colorway": COLORS,
        "template": "none",
        "margin": {"t": 60, "r": 20},
        **layout,
    }
    drawn = [{key: _label(value) if key in TEXTS else value for key, value in trace.items()} for trace in traces]
    arguments = ", ".join(map(to_json, (drawn, full, BUTTONS)))
    return (
        f'<div class="plot" data-plot="{escape(name)}"></div>\n'
        f"<script>Plotly.newPlot(document.currentScript.previousElementSibling, {arguments});</script>"
    )


def _label(value: Any) -> Any:
    """Escape text, or a list that contains text, for plotly, which interprets an HTML-like markup."""
    if isinstance(value, str):
        return escape(value, quote=False).replace("\n", "<br>")
    return [_label(item) for item in value] if isinstance(value, (list, tuple)) else value


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(str(name))}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>'


def text(words: str, kind: str = "") -> str:
    return f'<p class="{escape(kind)}">{escape(words)}</p>'


def heading(words: str) -> str:
    return f"<h2>{escape(words)}</h2>"


def page(title: str, parts: Sequence[str], data: Any) -> str:
    """The complete HTML file."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as missing:
        raise MKernelError("pages with plots need the package plotly: pip install 'mkernel-gpu[cli]'") from missing
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{STYLE}</style>
<script>{get_plotlyjs()}</script>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
<p class="small">mkernel {__version__}</p>
<script type="application/json" id="data">{to_json(data)}</script>
</body>
</html>
"""


def to_json(value: Any) -> str:
    """JSON that can be embedded in a script element: no NaN, and no characters that begin or end markup."""
    text = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
