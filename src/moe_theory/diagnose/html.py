"""A report as a page: what `Report.to_dict` says, with its plots drawn in it; it asks for nothing from elsewhere.

A plot has a row for each layer, with its name and numbers as text beside it, so that only the drawing is stretched to
the width of a screen. One colour stands for one thing: loads, gaps, gates, and what was found.
"""

import math
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

#: The highest bar of a load, in multiples of the uniform one; what is beyond ends there.
HIGHEST = 4.0

#: The decades between which a gate's distance is drawn, over its limit.
DECADES = (-3, 6)

#: How near to an end of that a dot is drawn.
AIR = 0.25

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --soft: #5a5a60; --line: #d4d4d8; --page: #fff; --pale: #f4f4f6;
  --load: #2563a8; --gap: #7a4fa3; --gate: #1f7a4d; --found: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececf0; --soft: #a9a9b2; --line: #44444c; --page: #17171a;
  --pale: #222227; --load: #4a86c8; --gap: #a583d6; --gate: #6fd0a0; --found: #ff8a80; } }
* { box-sizing: border-box; }
footer { margin-top: 2rem; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1rem; }
h1, h2, h3 { line-height: 1.25; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .25rem; } h3 { font-size: 1rem; margin: 1rem 0 0; }
p, ul { margin: .25rem 0; max-width: 46rem; overflow-wrap: anywhere; } .soft, .axis, footer { color: var(--soft); }
.axis, .numbers, footer, table, .key { font-size: .875rem; }
.found { color: var(--found); font-weight: 600; }
.row { display: grid; grid-template-columns: 13rem 1fr 14rem; gap: .25rem 1rem; align-items: center;
  border-top: 1px solid var(--line); padding: .35rem 0; }
.name { overflow-wrap: anywhere; font-size: .875rem; }
.axis { display: flex; justify-content: space-between; gap: 1rem; }
svg { display: block; width: 100%; height: 3rem; background: var(--pale); }
.gate svg { height: 1.75rem; }
svg .bars { stroke: none; }
.load .bars, .key .load { fill: var(--load); background: var(--load); }
.gap .bars, .key .gap { fill: var(--gap); background: var(--gap); }
svg .mark { stroke: var(--ink); stroke-dasharray: 4 3; stroke-width: 1.5; vector-effect: non-scaling-stroke; }
svg .dot { stroke: var(--soft); stroke-width: 7; stroke-linecap: round; vector-effect: non-scaling-stroke; }
svg .dot.fits { stroke: var(--gate); stroke-width: 12; }
.key { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: .25rem 0 .5rem; }
.key i { display: inline-block; width: 1rem; height: .75rem; margin-right: .4rem; }
.key i.mark { height: 0; border-top: 2px dashed var(--ink); vertical-align: middle; }
.key i.dot { width: .6rem; height: .6rem; border-radius: 50%; background: var(--soft); }
.key i.dot.fits { width: .75rem; height: .75rem; background: var(--gate); }
.scroll { overflow-x: auto; } .scroll:focus-visible { outline: 2px solid var(--ink); }
table { border-collapse: collapse; } th, td { text-align: left; padding: .25rem .75rem .25rem 0; vertical-align: top; }
th { color: var(--soft); font-weight: 600; } tr { border-top: 1px solid var(--line); } td { white-space: nowrap; }
td.long { white-space: normal; min-width: 12rem; }
@media (max-width: 48rem) { .row { grid-template-columns: 1fr; } }
"""


def page(told: dict[str, Any]) -> str:
    """What `Report.to_dict` says, as a page of HTML."""
    heading = f"Routers of {told['of']}" if told["of"] else "A report of routers"
    layers = told["layers"]
    parts = [
        f"<h1>{escape(heading)}</h1>",
        _verdict(told),
        _findings(told["findings"]),
        _loads(layers),
        _gaps([layer for layer in layers if layer["gaps"]["counts"]]),
        _gates([layer for layer in layers if layer["gate"]]),
        _section("Balancing loss", "", _table(_of_losses(told["balance"]))) if told["balance"] else "",
        _section("All layers", "Shares are those of the tokens.", _table([_measured(layer) for layer in layers])),
        _listed("Not asked", told["unasked"]),
        _listed("Left out", told["left_out"]),
        _versions(told["versions"]),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(heading)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, parts))
        + "\n</main>\n</body>\n</html>\n"
    )


def _verdict(told: dict[str, Any]) -> str:
    """What was found in a line, and in how much."""
    found = ", ".join(told["found"])
    said = f'<span class="found">Found: {escape(found)}.</span>' if found else "Nothing found."
    return f"<p>{said} {_count(len(told['layers']), 'layer')}, {_count(told['tokens'], 'token')}.</p>"


def _findings(findings: list[dict]) -> str:
    """For each kind what it says and what to do, and the layers in which it was found."""
    parts = []
    for name, rows in groupby(sorted(findings, key=lambda row: row["name"]), lambda row: row["name"]):
        rows = [*rows]
        parts.append(
            f'<h3 class="found">{escape(name)}</h3><p>{escape(_sentence(rows[0]["says"]))}</p>'
            f"<p>To do: {escape(rows[0]['act'])}.</p>"
        )
        parts.append(_table([{key: row[key] for key in ("where", "value", "limit", "detail")} for row in rows]))
    return _section("Findings", "", *parts) if parts else ""


def _loads(layers: list[dict]) -> str:
    """A bar for each expert, its load over the uniform one."""
    times = [[load * len(layer["loads"]) for load in layer["loads"]] for layer in layers]
    top = min(HIGHEST, max([2.0, *(max(own) for own in times)]))
    rows = []
    for layer, own in zip(layers, times, strict=True):
        experts, idle = len(own), len(layer["dead"])
        numbers = [f"in use {layer['effective']:.3g} of {experts}", f"busiest {max(own):.3g} times uniform"]
        numbers += [f"{idle} idle"] if idle else []
        alt = f"{layer['where']}: loads of {_count(experts, 'expert')}, {', '.join(numbers)}"
        drawn = _bars(own, top) + _mark(f"M0 {top - 1:g}H{experts}")
        rows.append(_row(layer["where"], _svg(experts, top, alt, drawn), numbers, layer["found"]))
    said = (
        f"For each expert its share of the selections, over that of a uniform load; from 0 to {top:.3g} times."
        + " A bar that reaches the top goes beyond it." * any(max(own) > top for own in times)
    )
    key = '<i class="load"></i>load of an expert', '<i class="mark"></i>uniform load, 1'
    return _section("Load by layer", said, _key(*key), *rows, _axis("first", "expert", "last"), kind="load")


def _gaps(layers: list[dict]) -> str:
    """Histograms of the gaps that are neither 0 nor infinite."""
    if not layers:
        return ""
    edges = layers[0]["gaps"]["edges"]
    used = [i for i, edge in enumerate(edges[:-1]) if edge and edges[i + 1] is not None and _in_bin(layers, i)]
    inside = range(used[0], used[-1] + 1) if used else range(0)
    rows = []
    for layer in layers:
        counts, tokens = layer["gaps"]["counts"], layer["tokens"]
        none = counts[0] / tokens if edges[0] == 0 else 0
        numbers = [f"undecided {layer['undecided'] / tokens:.3g} of the tokens", f"flips {layer['flips']:.3g}"]
        numbers += [f"no gap {none:.3g}"] if none else []
        alt = f"{layer['where']}: histogram of {_count(sum(counts), 'gap')}, {', '.join(numbers)}"
        drawn = _bars(_relative([counts[i] for i in inside]), 1)
        rows.append(_row(layer["where"], _svg(max(1, len(inside)), 1, alt, drawn), numbers))
    said = (
        "How many tokens have which gap: by how much the last selected expert leads the first rejected one. The "
        "highest bar of a layer fills its row. Undecided: the gap is within the rounding of the scores at worst; "
        "flips: how many sets of experts rounding changes on average."
    )
    ends = (f"{edges[inside[0]]:.2g}", f"{edges[inside[-1] + 1]:.2g}") if inside else ("", "")
    axis = _axis(ends[0], "gap, each bin by the same factor", ends[1])
    return _section("Gaps by layer", said, _key('<i class="gap"></i>tokens'), *rows, axis, kind="gap")


def _in_bin(layers: list[dict], i: int) -> bool:
    """Whether any layer has a gap in a bin."""
    return any(layer["gaps"]["counts"][i] for layer in layers)


def _gates(layers: list[dict]) -> str:
    """How far the output of a layer is from that of each gate, over the limit of rounding."""
    if not layers:
        return ""
    low, high = DECADES
    rows = []
    for layer in layers:
        gate = layer["gate"]
        off = {name: math.inf if value is None else value for name, value in gate["off"].items()}
        numbers = [f"{gate['name']}" + ("" if gate["factor"] is None else f" times {gate['factor']:.4g}")]
        numbers.append(f"selects by {gate['selects_by']}")
        drawn = "".join(_dot(name, value) for name, value in sorted(off.items(), key=lambda pair: -pair[1]))
        alt = (
            f"{layer['where']}: distance of {_count(len(off), 'gate')} from what the layer computes; {numbers[0]} fits"
        )
        rows.append(_row(layer["where"], _svg(high - low, 1, alt, _mark(f"M{-low} 0V1") + drawn), numbers))
    said = "How far a layer's output is from that of each gate that is known, over the limit that rounding sets it."
    key = (
        '<i class="dot fits"></i>gate within its limit',
        '<i class="dot"></i>other gate',
        '<i class="mark"></i>limit, 1',
    )
    axis = _axis(f"1e{low}", "distance over limit, by decades", f"1e{high}")
    return _section("Gates by layer", said, _key(*key), *rows, axis, kind="gate")


def _measured(layer: dict) -> dict[str, Any]:
    """The numbers of a layer for the table of all; those that were not asked are None."""
    tokens, gate = layer["tokens"], layer["gate"] or {}
    return {
        "layer": layer["where"],
        "tokens": tokens,
        "selected": layer["k"],
        "in use": layer["effective"],
        "idle": len(layer["dead"]),
        "dropped": layer["dropped"],
        "undecided": None if layer["undecided"] is None else layer["undecided"] / tokens,
        "flips": layer["flips"],
        f"changed by noise {layer['noise']:g}": layer["changed"],
        "gate": gate.get("name"),
        "slope": gate.get("gradient"),
        "jump": gate.get("jump"),
        "learns": gate.get("learns"),
        "common shift": layer["gauge"],
    }


def _of_losses(losses: list[dict]) -> list[dict]:
    names = ("where", "reads", "scale", "coefficient", "configured", "blind")
    return [{name: loss[name] for name in names} for loss in losses]


def _relative(counts: list[int]) -> list[float]:
    return [count / max(1, *counts) for count in counts]


def _bars(heights: list[float], top: float) -> str:
    """Bars from the bottom of a drawing, each with the number of its place as abscissa."""
    air = 0.1 if len(heights) <= 64 else 0
    drawn = (
        f"M{i + air:g} {top:g}V{max(0.0, top - height):.4g}h{1 - 2 * air:g}V{top:g}z"
        for i, height in enumerate(heights)
        if height
    )
    return f'<path class="bars" d="{"".join(drawn)}"/>'


def _dot(name: str, off: float) -> str:
    low, high = DECADES
    at = min(max(math.log10(off), low + AIR), high - AIR) if off > 0 else low + AIR
    kind = "dot fits" if off <= 1 else "dot"
    return f'<path class="{kind}" d="M{at - low:.3f} .5h.001"><title>{escape(name)}: {off:.3g}</title></path>'


def _mark(path: str) -> str:
    return f'<path class="mark" d="{path}"/>'


def _svg(width: float, height: float, alt: str, drawn: str) -> str:
    return (
        f'<svg role="img" viewBox="0 0 {width:g} {height:g}" preserveAspectRatio="none"><title>{escape(alt)}</title>'
        f"{drawn}</svg>"
    )


def _row(name: str, drawing: str, numbers: list[str], found: Sequence[str] = ()) -> str:
    told = "<br>".join(map(escape, numbers))
    mark = f'<br><span class="found">{escape(", ".join(found))}</span>' if found else ""
    return (
        f'<div class="row"><div class="name">{escape(name)}{mark}</div>{drawing}<div class="numbers">{told}</div></div>'
    )


def _axis(left: str, middle: str, right: str) -> str:
    """What stands below the drawings of a section: the two ends of its axis, and its name in between."""
    said = "".join(f"<span>{escape(text)}</span>" for text in (left, middle, right))
    return f'<div class="row"><div></div><div class="axis">{said}</div><div></div></div>'


def _key(*entries: str) -> str:
    return f'<div class="key">{"".join(f"<span>{entry}</span>" for entry in entries)}</div>'


def _section(title: str, said: str, *parts: str, kind: str = "") -> str:
    said = f"<p>{escape(said)}</p>" if said else ""
    return f'<section class="{kind}"><h2>{escape(title)}</h2>{said}\n' + "\n".join(parts) + "</section>"


def _listed(title: str, lines: list[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return _section(title, "", f"<ul>{items}</ul>") if lines else ""


def _table(rows: list[dict[str, Any]]) -> str:
    """Rows with the columns of which any row has something; it scrolls by itself where it is wider than the screen."""
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join("<tr>" + "".join(_cell(row[name]) for name in columns) + "</tr>" for row in rows)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="table">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(value: Any) -> str:
    said = "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    kind = ' class="long"' if len(said) > 40 else ""
    return f"<td{kind}>{escape(said)}</td>"


def _versions(versions: dict[str, str | None]) -> str:
    said = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    return f"<footer><p>{escape(said)}</p></footer>"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
