"""Which claim rests on which: chains and layers of the graph, and boxes that lead to the claims.

A graph is a mapping from each claim to those that it rests on; a claim comes after them in some order.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

Graph = Mapping[str, Sequence[str]]


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


def layers(graph: Graph) -> list[list[str]]:
    """Rows of claims by the length of their longest chain, so that each is below all that it rests on."""
    depth = {claim: len(chain) for claim, chain in chains(graph).items()}
    return [[claim for claim in graph if depth[claim] == row] for row in range(1, max(depth.values(), default=0) + 1)]


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


def drawing(graph: Graph, nodes: Mapping[str, Node], label: str) -> str:
    """The graph as rows of boxes that lead to the claims; book.js lights the neighbours that `data-near` names.

    Args:
        graph: the claims, each with those it rests on.
        nodes: what to show of each.
        label: what the drawing is called where it is read out.
    """
    users = turned(graph)

    def box(claim: str) -> str:
        href, verdict, title = nodes[claim].href, nodes[claim].verdict, escape(nodes[claim].title)
        return (
            f'<a href="{href}" class="node claim-{verdict}" data-claim="{claim}" title="{title}" aria-label="{title}" '
            f'data-near="{" ".join([*graph[claim], *users[claim]])}">'
            f'<span class="id">{claim}</span> <span class="word">{verdict}</span></a>'
        )

    rows = "".join(f'<div class="layer">{"".join(map(box, row))}</div>' for row in layers(graph))
    return f'<div class="claim-map" role="group" aria-label="{escape(label)}">{rows}</div>'
