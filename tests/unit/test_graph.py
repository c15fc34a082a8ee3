"""Which claim rests on which: the graph, its layers, its drawing."""

import re
from itertools import pairwise

import pytest

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


def test_steps_that_follow_from_others_are_not_drawn():
    assert claim_graph.reduced(GRAPH) == {"d": ["c"], "a": [], "b": ["a"], "c": ["b"], "e": ["a"]}


@pytest.mark.parametrize("graph", [GRAPH, REGISTRY], ids=["small", "registry"])
def test_a_reduced_graph_reaches_the_same(graph):
    fewer = claim_graph.reduced(graph)
    for claim in graph:
        assert claim_graph.reached(fewer, claim) == claim_graph.reached(graph, claim)
        assert not any(other in claim_graph.reached(fewer, via) for via in fewer[claim] for other in fewer[claim])


@pytest.mark.parametrize("graph", [GRAPH, REGISTRY], ids=["small", "registry"])
@pytest.mark.parametrize("across", [1, 2, 5])
def test_every_claim_is_below_what_it_rests_on(graph, across):
    rows = claim_graph.layers(graph, across)
    row_of = {claim: number for number, row in enumerate(rows) for claim in row}
    assert sorted(row_of) == sorted(graph) and sum(map(len, rows)) == len(graph)
    assert max(map(len, rows)) <= across
    assert all(row_of[other] < row_of[claim] for claim, others in graph.items() for other in others)


def test_neighbours_come_close():
    """Two pairs that would cross do not."""
    graph = {"a": [], "b": [], "x": ["b"], "y": ["a"]}
    above, below = claim_graph.arranged([["a", "b"], ["x", "y"]], graph)
    assert (above.index("a") < above.index("b")) == (below.index("y") < below.index("x"))


@pytest.mark.parametrize("claim", REGISTRY)
def test_an_id_fits_its_box(claim):
    broken = claim_graph.lines(claim)
    assert "".join(broken) == claim and len(broken) <= 2
    assert all(len(line) <= claim_graph.LETTERS for line in broken)


def test_the_drawing_has_a_link_for_each_claim_and_a_line_for_each_step():
    nodes = {c: claim_graph.Node(f"#{c}", "holds", f"{c} holds: Lemma <1>") for c in GRAPH}
    svg = claim_graph.drawing(GRAPH, nodes, "all & some")
    assert 'aria-label="all &amp; some"' in svg
    assert re.findall(r'<a href="#(\w)" class="node claim-holds"', svg).__len__() == len(GRAPH)
    assert svg.count("<title>") == len(GRAPH) and "Lemma &lt;1&gt;" in svg
    lines = {(a, b) for a, b in re.findall(r'data-from="(\w)" data-to="(\w)"', svg)}
    assert lines == {("a", "b"), ("b", "c"), ("c", "d"), ("a", "e")}


@pytest.mark.parametrize("lane", range(claim_graph.LANES))
def test_a_long_line_runs_through_a_gap_of_the_rows_between(lane):
    row, step = ["p", "q"], claim_graph.STEP_Y
    middles = claim_graph.places(len(row))
    path = claim_graph._line((middles[0], claim_graph.HEIGHT), (middles[0], 2 * step), [row], lane)
    stops = [tuple(map(int, stop.split()[-2:])) for stop in path.split("C")[1:]]
    at_row = [x for x, y in stops if y in (step, step + claim_graph.HEIGHT)]
    assert len(at_row) == 2 and all(abs(x - m) > claim_graph.WIDTH / 2 for x in at_row for m in middles)
    assert all(b[1] >= a[1] for a, b in pairwise(stops)) and stops[-1] == (round(middles[0]), 2 * step)
    assert claim_graph.STEP_X - claim_graph.WIDTH > 2 * claim_graph.LANE * (claim_graph.LANES // 2)
