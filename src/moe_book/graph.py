"""Which claim rests on which: chains and layers of the graph, and its drawing as SVG.

A graph is a mapping from each claim to those that it rests on; a claim comes after them in some order.
"""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

Graph = Mapping[str, Sequence[str]]

ACROSS = 5  # claims in a row of the drawing
WIDTH, HEIGHT = 115, 48  # of a claim's box, in pixels
STEP_X, STEP_Y = 134, 92  # from one box to the next, and from one row to the next: five fit the column of text
LANES, LANE = 5, 3  # in a gap between boxes, and from one to the next: lines from one claim keep to one of them
MARGIN = LANE * (LANES // 2) + 2
LETTERS = 16  # of an id that fit in a line of its box
SWEEPS = 8  # over the rows, to bring neighbours close to each other


# --- the graph ----------------------------------------------------------------------------------


def turned(graph: Graph) -> dict[str, list[str]]:
    """For each claim those that rest on it, in the order of the graph."""
    return {claim: [user for user, others in graph.items() if claim in others] for claim in graph}


def reached(graph: Graph, claim: str) -> set[str]:
    """All claims that one comes to from a claim, in one step or more."""
    found, todo = set(), list(graph[claim])
    while todo:
        other = todo.pop()
        if other not in found:
            found.add(other)
            todo += graph[other]
    return found


def chains(graph: Graph) -> dict[str, list[str]]:
    """For each claim a longest chain that ends with it, in which each rests on the one before; the first if several."""
    longest: dict[str, list[str]] = {}

    def chain(claim: str) -> list[str]:
        if claim not in longest:
            longest[claim] = [*max(map(chain, graph[claim]), key=len, default=[]), claim]
        return longest[claim]

    return {claim: chain(claim) for claim in graph}


def reduced(graph: Graph) -> dict[str, list[str]]:
    """The graph without the steps that follow from others: those to claims that another one rests on, too."""
    return {
        claim: [other for other in others if not any(other in reached(graph, via) for via in others)]
        for claim, others in graph.items()
    }


# --- its layers ---------------------------------------------------------------------------------


def layers(graph: Graph, across: int = ACROSS) -> list[list[str]]:
    """Rows of at most `across` claims, each below all that it rests on; first those with the longest chains below."""
    depth = {claim: len(chain) for claim, chain in chains(turned(graph)).items()}
    waiting, rows = sorted(graph, key=lambda claim: -depth[claim]), []
    while waiting:
        ready = [claim for claim in waiting if not set(graph[claim]) & set(waiting)]
        rows.append(ready[:across])
        waiting = [claim for claim in waiting if claim not in rows[-1]]
    return arranged(rows, graph)


def arranged(rows: list[list[str]], graph: Graph) -> list[list[str]]:
    """The rows with neighbours of the graph brought close: each claim goes to the mean place of its neighbours."""
    back = turned(graph)
    for sweep in range(SWEEPS):
        for number in range(len(rows))[:: 1 if sweep % 2 == 0 else -1]:
            place = {claim: x for row in rows for claim, x in zip(row, places(len(row)), strict=True)}
            near = {c: [place[n] for n in (*graph[c], *back[c])] or [place[c]] for c in rows[number]}
            rows[number] = sorted(rows[number], key=lambda claim: sum(near[claim]) / len(near[claim]))
    return rows


def places(count: int) -> list[float]:
    """The middles of a row's boxes."""
    return [ACROSS * STEP_X * (i + 0.5) / count for i in range(count)]


# --- its drawing --------------------------------------------------------------------------------


class Node(NamedTuple):
    """A claim in the drawing.

    Attributes:
        href: where it leads.
        verdict: in words; its colour is that of the class `claim-VERDICT`.
        title: what is read out, and shown where one points.
    """

    href: str
    verdict: str
    title: str


def lines(claim: str) -> list[str]:
    """A claim's id in lines that fit its box, broken after hyphens."""
    broken = [""]
    for part in claim.replace("-", "-\0").split("\0"):
        if len(broken[-1] + part) > LETTERS and broken[-1]:
            broken.append("")
        broken[-1] += part
    return broken


def _box(claim: str, node: Node, x: float, y: float) -> str:
    """A box that leads to its claim: the id and the verdict."""
    texts = [*lines(claim), node.verdict]
    top = y + HEIGHT / 2 - 13 * (len(texts) - 1) / 2 + 4
    spans = "".join(
        f'<text x="{x:.0f}" y="{top + 13 * i:.0f}" class="{"id" if i < len(texts) - 1 else "word"}">{text}</text>'
        for i, text in enumerate(texts)
    )
    return (
        f'<a href="{node.href}" class="node claim-{node.verdict}" data-claim="{claim}" '
        f'aria-label="{escape(node.title)}"><title>{escape(node.title)}</title>'
        f'<rect x="{x - WIDTH / 2:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>{spans}</a>'
    )


def _line(start: tuple[float, float], end: tuple[float, float], rows: Sequence[Sequence[str]], lane: int) -> str:
    """A path from the foot of a box to the head of one below, through gaps of the rows that are between them."""
    stops = [start]
    for i, row in enumerate(rows, 1):
        straight = start[0] + i / (len(rows) + 1) * (end[0] - start[0])
        gaps = [ACROSS * STEP_X * j / len(row) for j in range(len(row) + 1)]
        x = min(gaps, key=lambda gap: abs(gap - straight)) + LANE * (lane - LANES // 2)
        y = start[1] - HEIGHT + i * STEP_Y
        stops += [(x, y), (x, y + HEIGHT)]
    path = f"M{start[0]:.0f} {start[1]:.0f}"
    for (x, y), (to_x, to_y) in pairwise([*stops, end]):
        middle = (y + to_y) / 2
        path += f"C{x:.0f} {middle:.0f} {to_x:.0f} {middle:.0f} {to_x:.0f} {to_y:.0f}"
    return path


def drawing(graph: Graph, nodes: Mapping[str, Node], label: str) -> str:
    """The graph as SVG: boxes that lead to the claims, lines from each down to those that rest on it.

    Args:
        graph: the claims, each with those it rests on.
        nodes: what to show of each.
        label: what the drawing is called where it is read out.
    """
    rows = layers(graph)
    at = {claim: (x, number) for number, row in enumerate(rows) for claim, x in zip(row, places(len(row)), strict=True)}
    lanes, paths = {claim: i % LANES for i, claim in enumerate(graph)}, []
    for claim, others in reduced(graph).items():
        for other in others:
            (x, row), (to_x, to_row) = at[other], at[claim]
            ends = (x, row * STEP_Y + HEIGHT), (to_x, to_row * STEP_Y)
            path = _line(*ends, rows[row + 1 : to_row], lanes[other])
            paths.append(f'<path d="{path}" data-from="{other}" data-to="{claim}"/>')
    boxes = [_box(claim, nodes[claim], x, row * STEP_Y) for claim, (x, row) in at.items()]
    width, height = ACROSS * STEP_X + 2 * MARGIN, (len(rows) - 1) * STEP_Y + HEIGHT + 4
    return (
        f'<svg class="claim-map" role="group" aria-label="{escape(label)}" width="{width}" height="{height}" '
        f'viewBox="{-MARGIN} -2 {width} {height}">{"".join(paths)}{"".join(boxes)}</svg>'
    )
