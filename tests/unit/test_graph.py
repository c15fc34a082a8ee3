"""Which claim rests on which: the graph, its layers, its drawing."""

import pytest
from bs4 import BeautifulSoup

from moe_book import graph as claim_graph
from moe_book import pages

#: d rests on all others, a on none; e stands below a only.
GRAPH = {"d": ["a", "b", "c"], "a": [], "b": ["a"], "c": ["b"], "e": ["a"]}
REGISTRY = pages.resting()


def test_users_and_what_is_reached_either_way():
    users = claim_graph.turned(GRAPH)
    assert users == {"d": [], "a": ["d", "b", "e"], "b": ["d", "c"], "c": ["d"], "e": []}
    assert claim_graph.reached(GRAPH, "d") == {"a", "b", "c"} and claim_graph.reached(GRAPH, "a") == set()
    assert claim_graph.reached(users, "b") == {"c", "d"}


def test_the_longest_chain_to_each_claim():
    found = claim_graph.chains(GRAPH)
    assert found == {"d": ["a", "b", "c", "d"], "a": ["a"], "b": ["a", "b"], "c": ["a", "b", "c"], "e": ["a", "e"]}


@pytest.mark.parametrize("graph", [GRAPH, REGISTRY], ids=["small", "registry"])
def test_every_claim_is_below_what_it_rests_on(graph):
    rows = claim_graph.layers(graph)
    row_of = {claim: number for number, row in enumerate(rows) for claim in row}
    assert sorted(row_of) == sorted(graph) and sum(map(len, rows)) == len(graph) and all(rows)
    assert all(row_of[other] < row_of[claim] for claim, others in graph.items() for other in others)


def test_the_drawing_has_a_link_for_each_claim_that_knows_its_neighbours():
    nodes = {c: claim_graph.Node(f"#{c}", "holds", f"{c} holds: Lemma <1>") for c in GRAPH}
    drawn = BeautifulSoup(claim_graph.drawing(GRAPH, nodes, "all & some"), "html.parser")
    assert drawn.div["aria-label"] == "all & some"
    boxes = {box["data-claim"]: box for box in drawn.select(".layer a.node.claim-holds")}
    assert len(boxes) == len(GRAPH) and all(box["href"] == f"#{claim}" for claim, box in boxes.items())
    assert boxes["a"]["aria-label"] == boxes["a"]["title"] == "a holds: Lemma <1>"
    assert {claim: set(box["data-near"].split()) for claim, box in boxes.items()} == {
        "d": {"a", "b", "c"},
        "a": {"d", "b", "e"},
        "b": {"a", "c", "d"},
        "c": {"b", "d"},
        "e": {"a"},
    }
