"""The figures that move: their formulas against the package's, and their handles as a reader uses them.

A new one is a line in `PAGES`, a function that compares its formulas, and one in test_drawn.py for what it draws.
"""

import json
import re

import numpy as np
import pytest
import torch
from conftest import HTML, ROOT
from test_book import barriers, opened

from moe_book import experiments
from moe_book.figures import COLORS
from moe_theory.models.mixture import MixingMeasure
from moe_theory.models.routers import Linear
from moe_theory.models.rules import softmax_topk, topk_softmax
from moe_theory.theory import exploration, identifiability, smoothing, threshold, two_gaussians

SCRIPTS = ROOT / "book" / "explorables"
#: The page of each.
PAGES = {
    "noise": "notebooks/03_smooth_routing.html",
    "race": "notebooks/04_exploration.html",
    "two_gaussians": "notebooks/11_two_gaussians.html",
    "lowered": "notebooks/26_your_own_moe.html",
    "softmaxes": "notebooks/14_order_of_operations.html",
    "shift": "notebooks/21_identifiability.html",
    "training": "book/index.html",
}
SETTINGS = 200  # random ones for each formula
#: Words of a drawing that lie on others or below a grip.
OVERLAPS = """e => {
    const boxes = of => [...e.querySelectorAll(of)].map(t => [t.textContent, t.getBoundingClientRect()]);
    const words = boxes('svg text'), all = [...words, ...boxes('svg .grip-dot')];
    const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 0
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 0;
    return words.flatMap(([s, a], i) =>
        all.slice(i + 1).filter(([, b]) => meet(a, b)).map(([t]) => `${s} below ${t || 'a grip'}`)); }"""
#: What is too small for a finger.
SMALL = """e => [...e.querySelectorAll('input, select, button, output a, .grip')].filter(t => {
    const { width, height } = t.getBoundingClientRect(); return Math.min(width, height) < 24;
}).map(t => t.outerHTML.slice(0, 80))"""
#: What is out of sight, below the page's bar or behind something, of the drawing, the readout and the handle.
HIDDEN = """([e, handle]) => { const bar = document.querySelector('.bd-header-article').getBoundingClientRect().bottom;
    return [e.querySelector('svg'), e.querySelector('output'), handle].filter(part => {
        const { left, right, top, bottom } = part.getBoundingClientRect();
        const seen = y => part.contains(document.elementFromPoint((left + right) / 2, y));
        return top < bar || bottom > innerHeight || !seen(top + 3) || !seen(bottom - 3);
    }).map(part => part.outerHTML.slice(0, 80)); }"""


def handles(tab, name: str):
    """What can be moved, without buttons."""
    return tab.locator(f".explorable[data-explorable={name}] :is(input, select)").all()


@pytest.fixture(scope="session")
def formulas(browser):
    """`formulas(name, expression, cases)`: the values of an expression in the formulas `f` and a case `c`."""
    tab = browser.new_context().new_page()
    tab.add_script_tag(path=SCRIPTS / "explorables.js")
    for name in PAGES:
        tab.add_script_tag(path=SCRIPTS / f"{name}.js")

    def values(name, expression, cases):
        of = f"(({{f}}) => {expression})({{f: Explorable.specs[n].formulas}})"
        return tab.evaluate(f"([n, all]) => all.map((c) => {of})", [name, cases])

    yield values
    tab.context.close()


def agree(shown, exact):
    """The page's numbers are the package's, to 1e-9."""
    assert np.abs(np.asarray(shown) - np.asarray(exact)).max() < 1e-9


def test_noise_is_that_of_the_package(formulas):
    rng = np.random.default_rng(0)
    cases = [
        dict(
            h=rng.uniform(-1, 1, rng.integers(2, 7)).tolist(),
            law=str(rng.choice(["uniform", "gaussian"])),
            scale=rng.uniform(0.1, 2),
        )
        for _ in range(SETTINGS)
    ]
    cases += [dict(h=[0.0] * M, law=law, scale=0.1) for M in range(2, 7) for law in ("uniform", "gaussian")]
    for name, of in (("probability", smoothing.route_probabilities), ("slope", smoothing.local_lipschitz)):
        shown = formulas("noise", f"c.h.map((_, m) => f.{name}(c.h, m, c.law, c.scale))", cases)
        for case, values in zip(cases, shown, strict=True):
            agree(values, of(case["h"], case["law"], case["scale"]))
    agree(
        formulas("noise", "f.kappa(c.law, c.scale)", cases),
        [smoothing.kappa(case["law"], case["scale"]) for case in cases],
    )


def test_softmaxes_are_those_of_the_package(formulas):
    rng = np.random.default_rng(1)
    draw = lambda: dict(h=rng.uniform(-2, 2, 4).tolist(), K=int(rng.integers(1, 3)), b=rng.uniform(-0.8, 0.8))  # noqa: E731
    cases = [draw() for _ in range(SETTINGS)]
    cases += [case | dict(b=b) for case, b in zip(cases, (-0.8, -0.05, 0.05, 0.8), strict=False)]
    for rule in (topk_softmax, softmax_topk):
        kind = str(rule is topk_softmax).lower()
        shown = formulas("softmaxes", f"f.gates(c.h, c.K, {kind})", cases)
        agree(shown, torch.stack([rule(torch.tensor(c["h"], dtype=torch.float64), c["K"]) for c in cases]))
        risk = lambda b, rule=rule: float(threshold.threshold_risk(torch.tensor(b, dtype=torch.float64), rule))  # noqa: E731
        agree(formulas("softmaxes", f"f.risk(c.b, {kind})", cases), [risk(c["b"]) for c in cases])
        step = 1e-5  # of central differences, whose error is below 1e-10
        slopes = [(risk(c["b"] + step) - risk(c["b"] - step)) / (2 * step) for c in cases]
        agree(formulas("softmaxes", f"f.slope(c.b, {kind})", cases), slopes)
        reported = []
        for case in cases:
            b = torch.tensor(case["b"], dtype=torch.float64, requires_grad=True)
            reported.append(float(torch.autograd.grad(threshold.threshold_risk(b, rule), b)[0]))
        shown = formulas("softmaxes", f"f.reported(c.b, {kind})", cases)
        agree(shown, reported)
        assert rule is softmax_topk or set(shown) == set(reported) == {0}


def test_shift_is_that_of_the_package(formulas):
    rng = np.random.default_rng(2)
    cases = [
        dict(
            rows=rng.uniform(-0.5, 0.5, (4, 2)).tolist(),
            c=rng.uniform(-0.75, 0.75, 2).tolist(),
            x=rng.uniform(-3, 3, 2).tolist(),
        )
        for _ in range(SETTINGS)
    ]
    moved = formulas("shift", "f.moved(c.rows, c.c)", cases)
    logits = formulas("shift", "f.logits(f.moved(c.rows, c.c), c.x)", cases)
    gates = formulas("shift", "[c.rows, f.moved(c.rows, c.c)].map((rows) => f.softmax(f.logits(rows, c.x)))", cases)
    centred = formulas("shift", "f.moved(c.rows, f.centre(c.rows))", cases)
    for case, rows, h, (before, after), middle in zip(cases, moved, logits, gates, centred, strict=True):
        vectors, c, x = (torch.tensor(case[key], dtype=torch.float64) for key in ("rows", "c", "x"))
        zero = vectors.new_zeros(4)
        G = MixingMeasure(beta0=zero, beta1=vectors, eta=vectors.new_ones(4, 3))
        there = identifiability.shifted(G, c, Linear()).beta1
        scores = Linear().scores(zero, there, x)
        agree(rows, there)
        agree(h, scores)
        agree(after, scores.softmax(-1))
        agree(before, after)
        agree(middle, identifiability.centred(G, Linear()).beta1)


def races(rng):
    """Starts, rates and a path length, over the range of the handles."""
    for _ in range(SETTINGS):
        x = np.sort(rng.standard_normal(rng.integers(2, 17)))[::-1].copy()
        x[1] = abs(x[1]) + 0.01
        x[0] = x[1] * (1 + 10 ** rng.uniform(-3, 1.3))
        c = np.ones(len(x))
        c[1] = 2 ** rng.uniform(-1, 1)
        yield dict(x=x.tolist(), c=c.tolist(), path=10 ** rng.uniform(-0.5, 3))


def test_race_is_that_of_the_package(formulas):
    cases = list(races(np.random.default_rng(1)))
    shown = formulas("race", "f.race(c.x, c.c, c.path, 300)", cases)
    for case, x in zip(cases, shown, strict=True):
        start, c = (torch.tensor(case[key], dtype=torch.float64) for key in "xc")
        agree(x, exploration.race(start, c, case["path"], steps=300))
    # What stops behind the winner stops at the bound on a follower, whose lead counts the rates.
    for case, limits in zip(cases, formulas("race", "f.limits(c.x, c.c)", cases), strict=True):
        (x, y), (c, d) = case["x"][:2], case["c"][:2]
        first = c * x > d * y
        behind, lead = (y, c * x / (d * y) - 1) if first else (x, d * y / (c * x) - 1)
        bound = exploration.runaway_bound(behind, lead)
        agree(limits[1 if first else 0] / bound, 1)


def test_the_chance_of_a_lost_lead_is_that_of_the_package_and_of_drawn_starts(formulas):
    rng = np.random.default_rng(2)
    cases = [dict(N=int(rng.integers(2, 17)), G=rng.uniform(1e-3, 0.5)) for _ in range(SETTINGS)]
    exact = [exploration.near_tie_probability(case["N"], case["G"]) for case in cases]
    agree(formulas("race", "f.nearTie(c.N, c.G)", cases), exact)
    drawn = [dict(racers=N, ratio=ratio, seed=1) for N in (2, 8, 16) for ratio in (0.1, 0.5)]
    chance = np.array(formulas("race", "f.overtakes(c.racers, 2 ** c.ratio)", drawn))
    lost = np.array(formulas("race", "f.play(c, 20000).lost", drawn)) / 20_000
    assert (abs(lost - chance) < 4 * np.sqrt(chance * (1 - chance) / 20_000)).all()


def routers(rng):
    """Noise and routers over the plane, with a law fine enough for float64."""
    for i in range(SETTINGS):
        r, sigma = (np.inf if i % 3 == 0 else rng.uniform(0.2, 3)), rng.uniform(0.5, 1.5)
        norm, degrees = 10 ** rng.uniform(-1, 1.47), rng.uniform(0.5, 89.5)
        m, s = norm * np.cos(np.radians(degrees)), norm * np.sin(np.radians(degrees))
        tau = sigma * np.linspace(-9, 9, 4001)
        wide = np.exp(-((tau / sigma) ** 2) / 2)
        law = two_gaussians.noise_law(2, r, sigma=sigma, nodes=1200)
        yield dict(r=r, sigma=sigma, m=m, s=s), two_gaussians.Law(tau, wide / wide.sum()) if r == np.inf else law


def test_two_gaussians_have_the_drift_and_the_flow_of_the_package(formulas):
    cases, laws = zip(*routers(np.random.default_rng(3)), strict=True)
    shown = formulas("two_gaussians", "Object.values(f.drift(f.noise(c.r, c.sigma), c.m, c.s))", cases)
    for case, law, values in zip(cases, laws, shown, strict=True):
        agree(values, two_gaussians.drift(law, np.asarray(case["m"]), np.asarray(case["s"])))
    few = [case | {"T": T} for case, T in zip(cases[:24], [0.1, 1, 10, 1000] * 6, strict=True)]
    ends = formulas("two_gaussians", "f.flow(f.noise(c.r, c.sigma), c, c.T, 1e-9).at(-1)", few)
    for case, law, end in zip(few, laws, ends, strict=False):
        start, times = np.array([case["m"], case["s"]]), np.array([0.0, case["T"]])
        exact = two_gaussians.reduced_flow(law, start, times)[:, -1]
        assert np.abs(np.array([end["m"], end["s"]]) - exact).max() < 1e-4 * case["m"] + 1e-4


def test_two_gaussians_turn_at_the_curve_of_the_theorem_and_take_the_step_of_descent(formulas):
    cases = [dict(sigma=sigma, degrees=d) for sigma in (0.5, 1.0, 1.5) for d in (1, 30, 60, 80)]
    edges = formulas("two_gaussians", "f.edge(c.sigma, c.degrees)", cases)
    agree(edges, [2 * np.cos(np.radians(c["degrees"])) / c["sigma"] ** 2 for c in cases])
    turns = formulas("two_gaussians", "f.turn(f.noise(Infinity, c.sigma), c.degrees)", cases)
    assert np.abs(np.array(turns) / edges - 1).max() < 1e-5
    there = [dict(r=0.5, norm=8), dict(r=0.5, norm=20), dict(r=1.5, norm=2)]  # the edge with truncation, by both ways
    back = formulas("two_gaussians", "f.turn(f.noise(c.r, 1), f.tilt(f.noise(c.r, 1), c.norm))", there)
    assert np.abs(np.array(back) / [case["norm"] for case in there] - 1).max() < 1e-3
    jumps = [dict(r=0.5, sigma=1.0, m=0.2, s=0.5, eta=eta) for eta in (0.01, 0.1, 4.0)]
    first = formulas("two_gaussians", "f.descent(f.noise(c.r, c.sigma), c, c.eta, 1)[1]", jumps)
    a, b, _ = two_gaussians.drift(two_gaussians.noise_law(2, 0.5), np.asarray(0.2), np.asarray(0.5))
    agree(
        [[w["m"], w["s"]] for w in first], [[0.2 + c["eta"] * (a * 0.2 + b), 0.5 * (1 + c["eta"] * a)] for c in jumps]
    )


def test_lowered_has_the_gates_of_the_package(formulas):
    rng = np.random.default_rng(4)
    h = rng.normal(0, 1.5, (SETTINGS, 6))
    j, t = np.argsort(h, 1)[:, rng.integers(0, 4)], rng.uniform(0, 5, SETTINGS)
    cases = [dict(h=hi.tolist(), j=int(ji), t=ti) for hi, ji, ti in zip(h, j, t, strict=True)]
    low = h.copy()
    low[np.arange(SETTINGS), j] -= t
    agree(formulas("lowered", "f.lowered(c.h, c.j, c.t)", cases), low)
    for name, rule in (("fullSoftmax", softmax_topk), ("renormalized", topk_softmax)):
        for logits in (h, low):
            same = [case | {"h": row.tolist()} for case, row in zip(cases, logits, strict=True)]
            agree(formulas("lowered", f"f.{name}(c.h)", same), rule(torch.from_numpy(logits), 2))
    kept = [softmax_topk(torch.from_numpy(logits), 2).sum(1).numpy() for logits in (low, h)]
    agree(formulas("lowered", "f.grows(c.h, c.j, c.t)", cases), kept[0] / kept[1])


#: Sets two handles at a time to their ends and all others to their starts; what is said and drawn that is no number.
PAIRS = """e => {
    const all = [...e.querySelectorAll('input, select')], found = [];
    const set = (field, value) => { field.value = value; field.dispatchEvent(new Event('input')); };
    const ends = f => (f.options ? [...f.options].map(o => o.value) : [f.min, f.max]);
    const reset = [...e.querySelectorAll('button')].at(-1);
    const look = () => { if (/NaN|undefined|Infinity/.test(e.innerHTML)) found.push(e.innerText); };
    all.forEach((a, i) => all.slice(i + 1).forEach(b => ends(a).forEach(v => ends(b).forEach(w => {
        reset.click(); set(a, v); set(b, w); look(); }))));
    return found; }"""


@pytest.mark.parametrize("name", PAGES)
def test_no_pair_of_ends_says_or_draws_what_is_no_number(browser, name):
    tab, place, _ = at_work(browser, name)
    assert place.evaluate(PAIRS) == []
    tab.context.close()


def test_noise_says_what_the_package_says(browser):
    tab, place, says = at_work(browser, "noise")
    for width in (1.0, 0.5):
        place.get_by_label("Width").fill(str(width))
        h, k = [0.2, 0, -0.15], smoothing.kappa("uniform", width)
        exact = (smoothing.route_probabilities, smoothing.local_lipschitz)
        p, slope = (float(np.asarray(of(h, "uniform", width))[0]) for of in exact)
        for words in (
            f"wins with probability {p:.2f}. To first order",
            f"at most {slope:.2f} D. The slope {slope:.2f} is {50 * slope / k:.0f} % of 2κ = {2 * k:.2f};",
            f"κM² = {9 * k:.1f}.",
        ):
            assert words in says()
    tab.context.close()


def test_race_says_what_the_package_says(browser, formulas):
    tab, place, says = at_work(browser, "race")
    (x,) = formulas("race", "f.withLead(f.start(8, 1), 10 ** -0.5)", [0])
    for path in (0.5, 2.5):
        place.get_by_role("slider", name="Length of the path").fill(str(path))
        end = exploration.race(torch.tensor(x, dtype=torch.float64), torch.ones(8, dtype=torch.float64), 10**path)
        grown = [float(fold) for fold in re.findall(r"([\d.]+)-fold", says())[:2]]
        assert np.allclose(grown, end[:2].numpy() / x[:2], rtol=0.02)
    place.get_by_label("Initial lead").fill("0")
    place.get_by_label("Rate of racer 2").fill("1")
    assert "racers 1 and 2 run away together" in says()
    tab.context.close()


def test_the_first_step_of_descent_is_said_as_it_is(browser):
    tab, place, says = at_work(browser, "two_gaussians")
    tau = np.linspace(-9, 9, 4001)
    law = two_gaussians.Law(tau, np.exp(-(tau**2) / 2) / np.exp(-(tau**2) / 2).sum())
    m, s = 10**-0.3 * np.cos(np.radians(70)), 10**-0.3 * np.sin(np.radians(70))
    a, b, _ = two_gaussians.drift(law, np.asarray(m), np.asarray(s))
    sides = set()
    for eta in (-2, -1.4, 0.6):
        place.get_by_label("Step size").fill(str(eta))
        first = (m + 10**eta * (a * m + b), s * (1 + 10**eta * a))
        degrees = np.degrees(np.arctan2(abs(first[1]), first[0]))
        norm, angle, side = re.search(
            r"step of descent ends at norm ([\d.]+) and angle ([\d.]+)°, (\w+) z", says()
        ).groups()
        assert abs(float(norm) - np.hypot(*first)) < 0.06 and abs(float(angle) - degrees) < 0.6
        assert side == ("past" if first[1] < 0 else "before")
        sides.add(side)
    assert sides == {"past", "before"}
    tab.context.close()


def test_the_shift_of_the_logits_is_said_as_it_is(browser):
    tab, place, says = at_work(browser, "shift")
    for c1, c2, degrees in ((0.45, 0.3, 60), (0.2, -0.5, 135)):
        for of, value in (("c, coordinate 1", c1), ("c, coordinate 2", c2), ("Angle of x", degrees)):
            place.get_by_label(of).fill(str(value))
        moved = 3 * (c1 * np.cos(np.radians(degrees)) + c2 * np.sin(np.radians(degrees)))
        assert f"by c · x = {moved:.2f} and".replace("-", "−") in says()
    tab.context.close()


def test_areas_are_the_numbers_of_the_training(browser):
    tab, place, _ = at_work(browser, "training")
    place.locator("input").press("End")
    run = json.loads(place.get_attribute("data-run"))
    drawn = place.locator("svg > rect").evaluate_all("all => all.map(e => e.getBoundingClientRect().width ** 2)")
    for name, areas in zip(("learned", "sent"), np.reshape(drawn, (2, -1)), strict=True):
        values = np.clip(np.array(run[name][-1]).ravel(), 0, None)
        assert np.abs(areas / areas.max() - values / values.max()).max() < 0.01
    tab.context.close()


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_every_handle_moves_by_keyboard_and_nothing_else_does(browser, name, width, scheme):
    """To both ends, with words that change; nothing is wider than its column, and the page stays where it is."""
    tab, complaints = opened(browser, PAGES[name], width, scheme)
    place = tab.locator(f".explorable[data-explorable={name}]")
    place.locator("section").wait_for()
    readout = place.locator("output")
    tall = lambda: place.evaluate("e => [e.firstElementChild.offsetHeight, parseFloat(getComputedStyle(e).minHeight)]")  # noqa: E731
    start = readout.inner_text()
    assert start.endswith(".") and not re.search("NaN|undefined|Infinity", start)
    heights = []
    assert place.evaluate(OVERLAPS) == []
    for handle in handles(tab, name):
        words = set()
        for end in ("Home", "End"):
            handle.press(end)
            words.add(readout.inner_text())
            heights.append(tall())
            assert tab.evaluate("() => document.documentElement.scrollWidth") <= width
            assert place.evaluate(OVERLAPS) == []
        assert len(words) == 2, handle.evaluate("e => e.parentElement.innerText")
    height, kept = max(heights)
    assert kept - 60 < height <= kept, f"the place of {name} is {height} pixels high, custom.css keeps {kept} free"
    label = place.locator("svg").get_attribute("aria-label")
    assert label.endswith(readout.inner_text())
    small = "e => [...e.querySelectorAll('text')].filter(t => parseFloat(getComputedStyle(t).fontSize) < 14).length"
    assert place.evaluate(small) == 0 and place.evaluate(SMALL) == []
    outside = """e => { const box = e.getBoundingClientRect();
        return [...e.querySelectorAll('text, section :not(option)')]
        .filter(t => !t.closest('svg') || t.tagName == 'text')
        .filter(t => t.getBoundingClientRect().right > box.right || t.getBoundingClientRect().left < box.left)
        .map(t => t.outerHTML.slice(0, 80)); }"""
    assert place.evaluate(outside) == []
    for button in place.get_by_role("button").all():  # the last one starts again
        button.press("Enter")
    assert readout.inner_text() == start and complaints == []
    tab.context.close()


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "light"), (1280, "dark"), (360, "dark")])
def test_what_has_been_moved_has_no_barriers(browser, name, width, scheme):
    """After every handle and every button, with one ring around what has the focus."""
    tab, complaints = opened(browser, PAGES[name], width, scheme)
    place = tab.locator(f".explorable[data-explorable={name}]")
    place.locator("section").wait_for()
    for button in place.get_by_role("button").all():
        button.press("Enter")
    for handle in handles(tab, name):
        handle.press("End")
        ring = handle.evaluate("e => (({outlineStyle, boxShadow}) => [outlineStyle, boxShadow])(getComputedStyle(e))")
        assert ring == ["solid", "none"]
    assert place.evaluate(OVERLAPS) == complaints == []
    assert barriers(tab, scheme) == []
    tab.context.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_phone_shows_a_handle_together_with_what_it_moves(browser, name):
    """Coming from the page's head and from its foot, at both ends of the handle."""
    tab, _ = opened(browser, PAGES[name], 360)
    tab.set_viewport_size({"width": 360, "height": 740})
    place = tab.locator(f".explorable[data-explorable={name}]")
    place.locator("section").wait_for()
    for handle in handles(tab, name):
        for end, far in (("Home", "0"), ("End", "document.body.scrollHeight")):
            handle.evaluate("e => e.blur()")
            tab.evaluate(f"() => window.scrollTo({{top: {far}, behavior: 'instant'}})")
            handle.press(end)
            hidden = tab.evaluate(HIDDEN, [place.element_handle(), handle.element_handle()])
            assert hidden == [], handle.evaluate("e => e.parentElement.innerText")
    tab.context.close()


def test_the_chance_in_the_race_leads_to_its_theorem(browser):
    tab, place, _ = at_work(browser, "race")
    place.get_by_role("button", name="100 new draws").press("Enter")
    place.locator("output a").click()
    assert tab.locator(f"[id='{tab.url.partition('#')[2]}']").inner_text().startswith("Theorem")
    tab.context.close()


def test_a_path_that_leaves_the_picture_has_a_tip_and_words(browser):
    tab, place, says = at_work(browser, "two_gaussians")
    tips = place.locator("svg path[fill*='measured'], svg path[fill*='bound']")
    assert tips.count() == 0 and "outside" not in says()
    place.get_by_label("Initial norm").press("Home")
    place.get_by_label("Step size").press("End")
    place.get_by_label("Noise truncated").fill("1.5")
    assert "ends at norm" in says() and says().endswith("(outside the picture).") and tips.count() == 1
    tab.context.close()


def at_work(browser, name):
    """The page of an explorable, its place, and what it says."""
    tab, _ = opened(browser, PAGES[name])
    place = tab.locator(f".explorable[data-explorable={name}]")
    place.locator("section").wait_for()
    return tab, place, place.locator("output").inner_text


def test_new_starts_are_counted_until_the_race_is_another(browser):
    tab, place, says = at_work(browser, "race")
    for button, played in (("New draw", 1), ("100 new draws", 101), ("New draw", 102)):
        place.get_by_role("button", name=button, exact=True).press("Enter")
        # at equal rates the leader wins
        assert says().endswith(f"The leader lost 0 of {played} draws; by theory it loses 0 %.")
    place.get_by_label("Rate of racer 2").press("End")
    assert says().endswith("positive and race.")
    place.get_by_role("button", name="100 new draws").press("Enter")
    (lost,) = re.findall(r"lost (\d+) of 100 draws;", says())
    assert 20 < int(lost) < 90
    tab.context.close()


def test_the_output_gives_the_hidden_gate_away(browser):
    """A reader who answers "full softmax" where the length of F moves is right each time, and both gates occur."""
    tab, place, says = at_work(browser, "lowered")
    press = lambda button: place.get_by_role("button", name=button).press("Enter")  # noqa: E731
    seen = set()
    press("It is renormalized")
    assert says().startswith("Press New layer first")
    for _ in range(8):
        press("New layer")
        assert says().endswith("see what F does.")
        press("It is renormalized")  # nothing has moved
        assert says().endswith("see what F does.")
        place.get_by_label("Lowered by").press("End")
        ((before, after),) = re.findall(r"from ([\d.]+) to ([\d.]+)\. Which gate", says())
        press("It is renormalized" if before == after else "It is full softmax")
        said = says()
        press("It is full softmax")
        press("It is renormalized")
        assert says() == f"Already answered. {said}"  # one answer for a layer
        seen |= set(re.findall(r"^Right \(\d of \d\): F (?:stays|changes), so it is ([a-z ]+)\.", said))
    assert seen == {"renormalized", "full softmax"}
    tab.context.close()


def test_the_start_of_the_router_comes_to_a_click(browser):
    tab, place, says = at_work(browser, "two_gaussians")
    before = says()
    place.locator("svg").scroll_into_view_if_needed()
    box = place.locator(".grip").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    tab.mouse.click(x + 90, y + 60)
    norm, angle = (place.get_by_label(of).get_attribute("aria-valuetext") for of in ("Initial norm", "Initial angle"))
    assert float(norm) > 0.8 and int(angle[:-1]) < 60 and says() != before
    tab.mouse.click(x, y)
    assert says() == before
    tab.context.close()


def test_the_training_plays_and_pauses_and_shows_what_is_stored(browser):
    """Its probabilities are those of the chapter's router, here by drawing the routing noise."""
    tab, complaints = opened(browser, PAGES["training"])
    place = tab.locator(".explorable[data-explorable=training]")
    place.locator("section").wait_for()
    assert not tab.locator("figure:has(img[src$='front.png'])").is_visible()
    run = json.loads(place.get_attribute("data-run"))
    stored = experiments.load("inner_products").query("activation == 'cubic'").iloc[0]
    assert run["steps"] == list(stored.steps_at)
    assert run["learned"] == np.array(stored.expert_v).swapaxes(1, 2).round(3).tolist()
    logits = 1.5 * np.array(stored.router_c).swapaxes(1, 2)  # of a centre of strength 1.5, the mean of [1, 2]
    noisy = logits + np.random.default_rng(0).uniform(size=(20_000, *logits.shape))
    drawn = (noisy.argmax(-1)[..., None] == np.arange(logits.shape[-1])).mean(0)
    assert np.abs(drawn - run["sent"]).max() < 5 * 0.5 / np.sqrt(20_000) + 0.0005
    slider, play = place.locator("input"), place.get_by_role("button").first
    assert slider.input_value() == "0"  # until somebody presses
    play.click()
    tab.wait_for_function("() => Number(document.querySelector('.explorable input').value) > 2")
    play.click()
    paused = slider.input_value()
    tab.wait_for_timeout(900)
    assert slider.input_value() == paused and play.inner_text() == "Play" and complaints == []
    tab.context.close()


@pytest.mark.parametrize("name", PAGES)
def test_every_grip_can_be_dragged(browser, name):
    """What it moves are handles: their values change with it, on both sides of where it was."""
    tab, complaints = opened(browser, PAGES[name])
    place = tab.locator(f".explorable[data-explorable={name}]")
    place.locator("section").wait_for()
    place.locator("svg").scroll_into_view_if_needed()
    values = lambda: place.locator("input").evaluate_all("all => all.map(e => e.value)")  # noqa: E731
    for i in range(place.locator(".grip").count()):
        seen = [values()]
        for side in (-1, 1):
            box = place.locator(".grip").nth(i).bounding_box()
            x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
            tab.mouse.move(x, y)
            tab.mouse.down()
            tab.mouse.move(x + 45 * side, y - 9, steps=4)
            tab.mouse.up()
            tab.mouse.move(x, y)  # let go: nothing follows
            seen.append(values())
        assert seen[1] not in (seen[0], seen[2])
    assert complaints == []
    tab.context.close()


def test_a_finger_drags_a_grip_and_not_the_page(browser):
    """From its start c = (0.45, 0.30) the shift of chapter 21 goes left and down with the finger."""
    context = browser.new_context(viewport={"width": 360, "height": 800}, has_touch=True, is_mobile=True)
    tab = context.new_page()
    tab.goto((HTML / PAGES["shift"]).as_uri())
    tab.wait_for_selector(".explorable section")
    tab.locator(".explorable svg").evaluate("e => window.scrollTo(0, e.getBoundingClientRect().top + scrollY - 150)")
    tab.evaluate("() => new Promise(requestAnimationFrame)")
    before, box = tab.evaluate("scrollY"), tab.locator(".explorable .grip").nth(1).bounding_box()
    x, y, send = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, context.new_cdp_session(tab).send
    for kind, i in (("touchStart", 0), *(("touchMove", i) for i in range(1, 9)), ("touchEnd", 0)):
        points = [{"x": x - 5 * i, "y": y + 6 * i}] if kind != "touchEnd" else []
        send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    c = tab.locator(".explorable input").evaluate_all("all => all.slice(0, 2).map(e => Number(e.value))")
    assert c[0] < 0.15 and c[1] < -0.1 and tab.evaluate("scrollY") == before
    context.close()


@pytest.mark.parametrize("name", PAGES)
def test_the_book_carries_the_current_explorable(name):
    for path in ("explorables.js", "explorables.css", f"{name}.js"):
        assert (HTML / "explorables" / path).read_bytes() == (SCRIPTS / path).read_bytes()


def test_colours_are_those_of_the_figures_and_in_dark_mode_as_the_filter_turns_them():
    """`invert(0.92) hue-rotate(180deg)`, which custom.css puts on the figures."""
    rotate = np.array([[-0.574, 1.43, 0.144], [0.426, 0.43, 0.144], [0.426, 1.43, -0.856]])
    light, dark = (SCRIPTS / "explorables.css").read_text().split('html[data-theme="dark"]')[:2]
    light, dark = (dict(re.findall(r"--ex-(\w+): #(\w{6})", part)) for part in (light, dark))
    rgb = lambda text: np.array([int(text[i : i + 2], 16) for i in (0, 2, 4)]) / 255  # noqa: E731
    for name in light.keys() - {"grid"}:
        assert f"#{light[name]}".upper() == COLORS[name]
        turned = (rotate @ (0.92 - 0.84 * rgb(light[name]))).clip(0, 1)
        assert np.abs(turned - rgb(dark[name])).max() < 1 / 255


def test_lines_stand_out_from_the_dark_page():
    """At least 3:1, the least contrast of what is no text."""
    dark = (SCRIPTS / "explorables.css").read_text().split('html[data-theme="dark"]')[1]
    colours = dict(re.findall(r"--ex-(\w+): #(\w{6})", dark)) | {"page": "121212"}

    def luminance(text):
        rgb = np.array([int(text[i : i + 2], 16) for i in (0, 2, 4)]) / 255
        return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]

    light = {name: luminance(text) + 0.05 for name, text in colours.items()}
    assert all(light[name] > 3 * light["page"] for name in light.keys() - {"grid", "page"})
