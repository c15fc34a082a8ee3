"""Formulas in the browser: every sign is there in their own font, and they fit a phone."""

import re

import pytest
from conftest import HTML
from test_book import PAGES, opened

LEAF = re.compile(r"<(mi|mo|mn|mtext)\b[^>]*>([^<]+)</\1>")


def signs() -> list[str]:
    """Each part of a formula that the book has, once, as a formula of its own."""
    found = {leaf[0] for page in PAGES for leaf in LEAF.finditer((HTML / page).read_text(encoding="utf-8"))}
    return sorted(found)


def test_every_sign_has_its_glyph(browser, tmp_path):
    """Else the browser takes another font, if it has one."""
    style = (HTML / "_static" / "temml.css").as_uri()
    leaves = signs()
    page = tmp_path / "signs.html"
    body = "".join(f"<p><math>{leaf}</math></p>" for leaf in leaves)
    page.write_text(f'<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="{style}">{body}', "utf-8")
    tab = browser.new_page()
    tab.goto(page.as_uri())
    tab.evaluate("() => document.fonts.ready")
    devtools = tab.context.new_cdp_session(tab)
    devtools.send("DOM.enable")
    devtools.send("CSS.enable")
    root = devtools.send("DOM.getDocument")["root"]["nodeId"]
    nodes = devtools.send("DOM.querySelectorAll", {"nodeId": root, "selector": "math > *"})["nodeIds"]
    fonts = [devtools.send("CSS.getPlatformFontsForNode", {"nodeId": node})["fonts"] for node in nodes]
    strange = {
        leaf: names
        for leaf, found in zip(leaves, fonts, strict=True)
        if (names := {font["familyName"] for font in found} - {"Latin Modern Math", "Temml-Script"})
    }
    tab.close()
    assert strange == {}
    assert len(leaves) > 400


@pytest.mark.parametrize("inside", ["<mn>2</mn>", "<mfrac><mn>2</mn><mi>x</mi></mfrac>"])
@pytest.mark.parametrize("root", ["<msqrt>{}</msqrt>", "<mroot>{}<mn>3</mn></mroot>"])
def test_a_root_has_its_sign(browser, tmp_path, root, inside):
    """No leaf has it: the browser puts it before what stands inside, and leaves it out where the font has none."""
    style = (HTML / "_static" / "temml.css").as_uri()
    page = tmp_path / "root.html"
    body = f"<math>{root.format(inside)}</math>"
    page.write_text(f'<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="{style}">{body}', "utf-8")
    tab = browser.new_page()
    tab.goto(page.as_uri())
    tab.evaluate("() => document.fonts.ready")
    before = "e => (e.firstElementChild.getBoundingClientRect().left - e.getBoundingClientRect().left)"
    ems = tab.eval_on_selector("msqrt, mroot", f"e => ({before})(e) / parseFloat(getComputedStyle(e).fontSize)")
    tab.close()
    assert 0.5 < ems < 1.5


#: Formulas on lines of their own that a phone has to scroll, by how much, and all of them.
WIDE = """() => [...document.querySelectorAll('article div.math > math')].filter(e => e.clientWidth)
    .map(e => e.scrollWidth - e.clientWidth)"""


@pytest.mark.parametrize("page", ["notebooks/11_two_gaussians.html", "notebooks/15_powers_of_k.html"])
def test_formulas_break_before_a_phone_scrolls_them(browser, page):
    """At 360 pixels most fit, which they do not in one row; at 1280 all fit."""
    tab, _ = opened(browser, page, 360)
    over = [width > 1 for width in tab.evaluate(WIDE)]
    tab.add_style_tag(content="math, mrow.part { flex-wrap: nowrap !important }")
    assert 2 * sum(over) < len(over) and sum(over) < 0.7 * sum(width > 1 for width in tab.evaluate(WIDE))
    tab.set_viewport_size({"width": 1280, "height": 900})
    assert max(tab.evaluate(WIDE)) <= 1
    tab.context.close()


def test_formulas_are_there_without_scripts(browser):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto((HTML / "notebooks/04_exploration.html").as_uri())
    assert tab.locator("article math").count() > 100 and "\\(" not in tab.inner_text("article")
    context.close()
