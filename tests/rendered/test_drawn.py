"""What the figures that move draw, in coordinates of the data, against the package, at random settings."""

import re

import numpy as np
import pytest
import torch
from matplotlib.path import Path
from test_explorables import PAGES, formulas  # noqa: F401

from moe_theory.models.rules import softmax_topk, topk_softmax
from moe_theory.theory import exploration, smoothing, threshold, two_gaussians

RULES = {"topk_softmax": topk_softmax, "softmax_topk": softmax_topk}
#: A picture as calls of its plots' methods, and what is said, at changes `c` of the start; `n` is the figure's name.
DRAWN = """(() => {
    const spec = Explorable.specs[n], plots = [];
    const start = Object.fromEntries(spec.handles.filter((h) => h.key).map((h) => [h.key, h.value]));
    const state = { ...spec.state, ...start, ...c };
    const plot = (_, axes) => {
        const marks = [], holds = (p) => [axes.x, axes.y].every(([low, high], a) => p[a] >= low && p[a] <= high);
        plots.push({ ...axes, marks });
        return new Proxy({}, { get: (_, what) => (what === "holds" ? holds : (...of) => marks.push([what, ...of])) });
    };
    spec.draw({ plot }, state);
    return JSON.parse(JSON.stringify({ state, plots, says: spec.readout(state) }));
})()"""
HANDLES = "JSON.parse(JSON.stringify(Explorable.specs[n].handles.filter((h) => h.key)))"


@pytest.fixture(scope="session")
def drawn(formulas):  # noqa: F811
    """`drawn(name, count, **changes)`: pictures at random settings, each with its `state`, `plots` and `says`."""

    def pictures(name, count=20, **changes):
        rng = np.random.default_rng(len(name))
        handles = formulas(name, HANDLES, [0])[0]

        def value(handle):
            if "choices" in handle:
                return str(rng.choice(list(handle["choices"])))
            steps = round((handle["max"] - handle["min"]) / handle["step"])
            return round(handle["min"] + handle["step"] * int(rng.integers(0, steps + 1)), 10)

        return formulas(name, DRAWN, [{h["key"]: value(h) for h in handles} | changes for _ in range(count)])

    return pictures


def marks(plot, what, colour=None, style=None):
    """The arguments of what a plot was told of one kind, of one colour and style if these are asked for."""
    found = [of for kind, *of in plot["marks"] if kind == what and (colour is None or colour in of)]
    return found if style is None else [of for of in found if ([*of, None][of.index(colour) + 1] or "") == style]


def said(pattern, picture):
    """The numbers that a sentence says, where `#` stands in a pattern for one."""
    found = re.search(re.escape(pattern).replace(r"\#", r"(−?\d+(?:\.\d+)?)"), picture["says"])
    assert found, (pattern, picture["says"])
    return [float(number.replace("−", "-")) for number in found.groups()]


def slope(line):
    (x, y), (u, v) = line[0][0], line[0][-1]
    return (v - y) / (u - x)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("name", [name for name in PAGES if name != "training"])
def test_numbers_of_the_axes_are_where_they_say_and_keys_name_their_colours(drawn, name):
    keys, shown = set(), set()
    for picture in drawn(name):
        for i, plot in enumerate(picture["plots"]):
            shown |= {(i, "ink")} | {(i, each) for mark in plot["marks"] for each in mark if isinstance(each, str)}
            for tick in [*plot.get("xticks", []), *plot.get("yticks", [])]:
                place, words = tick if isinstance(tick, list) else (tick, tick)
                assert min(abs(float(words) - place), abs(float(words) / 10**place - 1)) < 1e-9
            for colour, words, *_ in plot.get("keys", []):
                for of, rule in (("renormalized", "topk_softmax"), ("full softmax", "softmax_topk")):
                    assert (of in words) == (colour == rule)
                keys.add((i, colour))
    assert keys <= shown


def test_noise_draws_the_probabilities_the_tangent_and_the_band(drawn):
    for picture in drawn("noise"):
        state, (bars, curve) = picture["state"], picture["plots"]
        h = np.array([state["h1"], state["h2"], state["h3"], 0, 0, 0][: state["experts"]])
        law, scale = state["law"], state["scale"]
        p = np.asarray(smoothing.route_probabilities(h, law, scale))
        assert np.abs(np.array([bar[1] for bar in marks(bars, "bar")]) - p).max() < 1e-9
        assert [bar[0] for bar in marks(bars, "bar")] == [*range(1, len(h) + 1)]
        (line,) = marks(curve, "line", "measured", "")
        away = -np.ones(len(h))
        away[0] = 1
        for D, value in line[0][::20]:
            assert abs(value - float(np.asarray(smoothing.route_probabilities(h + D * away, law, scale))[0])) < 1e-9
        (tangent,) = marks(curve, "line", "measured", "dashed")
        assert abs(slope(tangent) - float(np.asarray(smoothing.local_lipschitz(h, law, scale))[0])) < 1e-9
        steepest = 2 * smoothing.kappa(law, scale)
        band = [slope(line) for line in marks(curve, "line", "sharp")]
        for (start, one, other), _ in marks(curve, "area", "sharp"):
            band += [(end[1] - start[1]) / (end[0] - start[0]) for end in (one, other)]
            assert start == [0, pytest.approx(p[0])]
        assert np.allclose(np.abs(band), steepest, rtol=1e-9) and len(band) == 6 and abs(sum(band)) < 1e-9
        some, most = float(np.asarray(smoothing.local_lipschitz(h, law, scale))[0]), len(h) ** 2 * steepest / 2
        told = said("by at most # D. The slope # is # % of 2κ = #; the paper allows κM² = #.", picture)
        exact = np.array([some, some, 100 * some / steepest, steepest, most])
        assert (np.abs(told - exact) < [0.0051, 0.0051, 0.51, 0.0051, 0.051]).all()
        chance = picture["says"].partition("probability ")[2].partition(". To")[0]
        if chance in ("0", "1"):
            assert abs(p[0] - int(chance)) < 1e-11
        else:
            bounds = {"below 0.01": (1e-13, 0.005), "above 0.99": (0.995, 1 - 1e-13)}
            low, high = bounds[chance] if chance in bounds else (float(chance) - 0.005, float(chance) + 0.005)
            assert low - 1e-9 * (chance not in bounds) <= p[0] <= high + 1e-9, picture["says"]


def test_the_race_draws_both_racers_and_the_limit_of_the_loser(drawn, formulas):  # noqa: F811
    for picture in drawn("race"):
        state, (plot,) = picture["state"], picture["plots"]
        case = {"racers": state["racers"], "seed": 1, "G": 10 ** state["lead"]}
        (x,) = formulas("race", "f.withLead(f.start(c.racers, c.seed), c.G)", [case])
        c = [1, 2 ** state["ratio"], *[1] * (len(x) - 2)]
        end = exploration.race(double(x), double(c), 10 ** state["path"]).log10()
        for colour, i in (("measured", 0), ("bound", 1)):
            (dot,) = marks(plot, "dot", colour)
            assert dot[0] == state["path"] and abs(dot[1] - end[i]) < 0.01
            (past,) = marks(plot, "line", colour, "")
            assert abs(past[0][0][1] - np.log10(x[i])) < 1e-9 and past[0][-1] == dot[:2]
        loser = int(c[0] * x[0] > c[1] * x[1])
        lead = c[1 - loser] * x[1 - loser] / (c[loser] * x[loser]) - 1
        colours = ("measured", "bound")
        flat = [
            (colour, y)
            for colour in colours
            for points, *_ in marks(plot, "line", colour, "thin dashed")
            if len(points) == 2 and (y := points[0][1]) == points[1][1]
        ]
        limit = float(exploration.runaway_bound(x[loser], lead))
        assert flat == [(colours[loser], pytest.approx(np.log10(limit)))]
        assert f"racer {2 - loser} wins, and racer {loser + 1} stops at" in picture["says"]
        at, _ = said("stops at # σ₀ (#-fold)", picture)
        assert abs(at / limit - 1) < 0.06 and f"{sum(xi > 0 for xi in x)} of {len(x)} products" in picture["says"]
        assert np.allclose(said("grown #-fold, and racer 2 #-fold", picture), 10 ** end[:2].numpy() / x[:2], rtol=0.06)


def test_each_draw_of_the_race_is_another(formulas):  # noqa: F811
    """200 draws are 100 and 100 more."""
    twice = "(() => { const a = f.play(c, 100), b = f.play({ ...c, ...a }, 100); return [b, f.play(c, 200)]; })()"
    states = [dict(racers=8, ratio=ratio, seed=1, counted="", played=0, lost=0) for ratio in (0.2, 0.5, 0.9)]
    for halves, whole in formulas("race", twice, states):
        assert halves == whole and whole["played"] == 200 and 0 < whole["lost"] < 200


def law_of(state):
    tau = state["sigma"] * np.linspace(-9, 9, 4001)
    wide = np.exp(-((tau / state["sigma"]) ** 2) / 2)
    if state["radius"] == 3.1:
        return two_gaussians.Law(tau, wide / wide.sum())
    return two_gaussians.noise_law(2, state["radius"], sigma=state["sigma"], nodes=1200)


def test_two_gaussians_draw_descent_its_sides_and_where_the_norm_shrinks(drawn):
    rng, sides, regions = np.random.default_rng(5), set(), set()
    for picture in drawn("two_gaussians", 8):
        state, (plot,) = picture["state"], picture["plots"]
        law, eta, norm = law_of(state), 10 ** state["eta"], 10 ** state["norm"]
        m, s = norm * np.cos(np.radians(state["degrees"])), norm * np.sin(np.radians(state["degrees"]))
        steps = []
        for _ in range(401):
            steps.append((np.log10(np.hypot(m, s)), np.degrees(np.arctan2(abs(s), m)), s < 0))
            a, b, _ = two_gaussians.drift(law, np.asarray(m), np.asarray(abs(s)))
            m, s = m + eta * (a * m + b), s * (1 + eta * a)
        at = np.array([step[:2] for step in steps])
        for x, y, _, hollow in marks(plot, "dot", "measured"):
            away = np.abs(at - [x, y]).max(1)
            near = {side for d, (*_, side) in zip(away, steps, strict=True) if d < 1e-3}
            assert hollow in near and (len(near) == 1 or y < 1e-2), (state, x, y)
            sides |= near
        told = said("first step of descent ends at norm # and angle #°", picture)
        assert abs(told[0] / 10 ** steps[1][0] - 1) < 0.06 and abs(told[1] - steps[1][1]) < 0.51
        assert f"{'past' if steps[1][2] else 'before'} z; step" in picture["says"]
        ((corners, _),) = marks(plot, "area")
        for x, y in zip(rng.uniform(-1, 1.47, 60), rng.uniform(1, 89, 60), strict=True):
            u, v = 10**x * np.cos(np.radians(y)), 10**x * np.sin(np.radians(y))
            a, b, _ = two_gaussians.drift(law, np.asarray(u), np.asarray(v))
            growth = float(a * (u * u + v * v) + b * u) / 10**x
            if abs(growth) > 0.02:
                assert Path(corners).contains_point((x, y)) == (growth < 0), (state, x, y)
                regions.add(growth < 0)
    assert sides == regions == {False, True}


@pytest.mark.parametrize(
    ("radius", "sigma", "words"),
    [
        (3.1, 1.0, "converges to"),
        (3.0, 1.5, "converges to"),
        (2.0, 1.5, "converges to"),
        (0.9, 1.5, "still moves at time 10⁶"),
        (0.5, 1.0, "still moves at time 10⁶"),
    ],
)
def test_the_flow_converges_where_the_clusters_overlap_only(drawn, radius, sigma, words):
    """From far away, too, where the integrator's rounding moves it longest."""
    for norm in (-1, 0, 1.46):
        for picture in drawn("two_gaussians", 2, radius=radius, sigma=sigma, norm=norm):
            assert picture["says"].startswith(f"The flow {words}"), picture["state"]


def test_softmaxes_draw_gates_risks_and_reported_slopes(drawn):
    for picture in drawn("softmaxes"):
        state, (bars, risks) = picture["state"], picture["plots"]
        h = double([[state[f"h{m}"] for m in range(1, 5)]]) - 1e-12 * torch.arange(4)  # of equal ones the first counts
        for name, rule in RULES.items():
            gates = rule(h, int(state["K"]))[0]
            shown = [bar[1] for bar in marks(bars, "bar", name)]
            assert np.abs(np.array(shown) - gates.numpy()).max() < 1e-9
            (curve,) = marks(risks, "line", name, "")
            for b, value in curve[0][::16]:
                assert abs(value - float(threshold.threshold_risk(double(b), rule))) < 1e-9
            b = double(state["b"]).requires_grad_()
            (reported,) = torch.autograd.grad(threshold.threshold_risk(b, rule), b)
            for tangent in marks(risks, "line", name, "dashed"):
                assert abs(slope(tangent) - float(reported)) < 1e-9
            assert len(marks(risks, "line", name, "dashed")) == (state["b"] != 0)
            if state["b"]:
                near = [float(threshold.threshold_risk(double(state["b"] + d), rule)) for d in (-1e-5, 1e-5)]
                kind, steep = "renormalized" if rule is topk_softmax else "full-softmax", (near[1] - near[0]) / 2e-5
                told = said(f"# of the {kind} slope #", picture)
                assert np.allclose(told, [float(reported), steep], rtol=0, atol=0.0051)
        sums = [float(rule(h, int(state["K"])).sum()) for rule in RULES.values()]
        assert np.allclose(said("gates sum to #, full-softmax gates to #.", picture), sums, atol=0.0051)


def test_the_shift_draws_rows_means_logits_and_gates(drawn):
    for picture in drawn("shift"):
        state, (plane, scores, shares) = picture["state"], picture["plots"]
        dots, c = marks(plane, "dot"), np.array([state["c1"], state["c2"]])
        own = [dot for dot in dots if dot[2] not in ("ink", "muted")]
        rows = np.array([dot[:2] for dot in own if len(dot) == 3])
        assert np.allclose([dot[:2] for dot in own if len(dot) == 4], rows + c) and len(rows) == 4
        means = [dot[:2] for colour in ("muted", "ink") for dot in dots if dot[2] == colour]
        assert np.allclose(means, [rows.mean(0), rows.mean(0) + c])
        x = 3 * np.array([np.cos(np.radians(state["angle"])), np.sin(np.radians(state["angle"]))])
        levels = marks(scores, "dot")
        assert np.allclose([dot[1] for dot in levels if len(dot) == 3], rows @ x)
        assert np.allclose([dot[1] for dot in levels if len(dot) == 4], (rows + c) @ x)
        gates = double(rows @ x).softmax(0).numpy()
        told = said("The mean row is (#, #). At this x the shift moves all logits by c · x = # and", picture)
        assert np.allclose(told, [*(rows.mean(0) + c), c @ x], atol=0.0051)
        assert np.allclose(said("gates at #, #, # and #.", picture), gates, atol=0.0051)
        for kind in ("bar", "dot"):
            assert np.allclose([mark[1] for mark in marks(shares, kind)], gates)


def test_lowered_draws_both_outputs_and_says_the_probability_before(drawn, formulas):  # noqa: F811
    for picture in drawn("lowered", 40):
        state, (outputs, _) = picture["state"], picture["plots"]
        (layer,) = formulas("lowered", "f.layer(c)", [state["seed"]])
        h, answers = np.array(layer["h"]), np.array(layer["answers"])
        j = np.argsort(-h)[int(state["rank"]) - 1]
        now = h - state["t"] * (np.arange(6) == j)
        for name, rule in RULES.items():
            ((start, end, _),) = marks(outputs, "arrow", name)
            assert np.allclose(np.subtract(end, start), rule(double(now)[None], 2)[0].numpy() @ answers)
        if state["t"]:
            p, kept = double(h).softmax(0)[j], [float(softmax_topk(double(of)[None], 2).sum()) for of in (now, h)]
            factor, said = re.search(r"by a factor of ([\d.]+) \(πᵃ. = ([\d.]+)\)", picture["says"]).groups()
            assert abs(float(said) - p) < 6e-5 and abs(float(factor) - kept[0] / kept[1]) < 6e-5


@pytest.mark.parametrize("gate", ["renormalized", "fullSoftmax"])
def test_nothing_but_the_output_tells_the_hidden_gate(drawn, gate):
    for picture in drawn("lowered", hidden=gate):
        outputs = picture["plots"][0]
        assert [arrow[2] for arrow in marks(outputs, "arrow")] == ["ink"]
        assert not any(name in str(outputs) for name in RULES)
        assert "softmax" not in picture["says"] and "renormal" not in picture["says"]
