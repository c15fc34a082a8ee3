"""What is done to rendered pages: formulas, icons, mended HTML."""

import base64
import re

import pytest
from bs4 import BeautifulSoup

from moe_book.finish import ICON_RULE, mended, with_files, with_formulas, with_icons, with_light_head, with_sizes
from moe_book.mathml import mathml

LIBRARY = (
    'a={moon:[512,512,[],"f186","M1 2"],"angle-left":[320,512,[8249],"f104","M3 4"],moon:[384,512,[],"f186","M5 6"]}'
)


def told(page: str) -> str:
    """What a page says, and its tags without what is inside of formulas."""
    return re.sub(r"<math.*?</math>", "F", with_formulas(page), flags=re.DOTALL)


def inside(formula: str, display: bool = False) -> str:
    """The words and signs of a formula, without spaces."""
    return re.sub(r"\s", "", BeautifulSoup(mathml(formula, display), "html.parser").text)


def test_a_formula_in_a_line_is_mathml():
    page = with_formulas(r'<p>So <span class="math notranslate nohighlight">\(a &lt; b\)</span> holds</p>')
    math = BeautifulSoup(page, "html.parser").math
    assert math.text == "a<b" and math.find_parent("span")["class"] == ["math"] and "held" not in page
    assert told(r"<td>\(x\)</td>") == '<td><span class="math">F</span></td>'
    assert told(r"<b><span>\(x\)</span></b>") == '<b><span><span class="math">F</span></span></b>'


@pytest.mark.parametrize(
    ("page", "held"),
    [
        (r"see (\(x\)), and", "(F),"),
        (r"the \(p\)-th one", "F-th"),
        (r"“\(p\)”; then", "“F”;"),
        (r"for \(p\): so", "F:"),
        (r"in \(p\)&amp;more", None),
        (r"\(p\) and", None),
        (r"the share \(p\)%.", "F%."),
        (r"<a>of \(p\)</a>; then", None),
    ],
)
def test_signs_are_held_to_their_formula(page, held):
    """And nothing of the text is lost."""
    soup = BeautifulSoup(told(page), "html.parser")
    found = soup.select_one(".held")
    assert (found.text if found else None) == held
    assert soup.text == BeautifulSoup(page.replace(r"\(x\)", "F").replace(r"\(p\)", "F"), "html.parser").text


def test_a_formula_on_its_own_line_keeps_address_and_number():
    page = (
        '<div class="math notranslate nohighlight" id="eq-a">\n<span class="eqno">(3.1)<a class="headerlink" '
        'href="#eq-a">#</a></span>\\[a = \\sum_i b_i,\\qquad c \\le d\\]</div>'
    )
    soup = BeautifulSoup(with_formulas(page), "html.parser")
    assert soup.div["id"] == "eq-a" and soup.div.math["display"] == "block"
    assert soup.select_one(".eqno a")["href"] == "#eq-a" and soup.select_one("math ~ .eqno")
    parts = [[row.text for row in part.find_all("mrow", recursive=False)] for part in soup.select("mrow.part")]
    assert parts == [["a", "=∑ibi,"], ["c", "≤d"]]


@pytest.mark.parametrize(
    ("formula", "rows"),
    [
        (r"P\big(a\ge b\big)\le c", ["P(a≥", "b)≤", "c"]),
        (r"\big|x\big|=1", ["|x|=", "1"]),
        (r"a,\dots,b", ["a,…,", "b"]),
        ("a-b", ["a−", "b"]),
    ],
)
def test_a_line_breaks_neither_inside_a_bracket_nor_before_a_lone_operator(formula, rows):
    """And large brackets, which are none for a browser, have no space of their own."""
    math = BeautifulSoup(mathml(formula), "html.parser").math
    assert [row.text for row in math.find_all("mrow", recursive=False)] == rows
    assert all(mo["lspace"] == mo["rspace"] == "0em" for mo in math.select("mo[minsize]"))


def test_code_and_scripts_are_left_as_they_are():
    for tag in ("pre", "code", "script", "style"):
        page = rf"<{tag} class='a'>\(x\)</{tag}>"
        assert with_formulas(page) == page


def test_a_formula_that_is_not_known_is_named():
    with pytest.raises(ValueError, match=r"formula: expected LaTeX that Temml knows, got '\\\\nonsense x'"):
        mathml(r"\nonsense x")


@pytest.mark.parametrize(
    ("formula", "signs"),
    [
        (r"\begin{cases}1&x>0\\0&x\le0\end{cases}", "{1x>00x≤0"),
        (r"\tfrac12\,\big(1-u/a\big)_+", "12(1−u/a)+"),
        (r"\operatorname{Cov}_l(\rho_{lm})", "Covl⁡(ρlm)"),
        (r"\mathbb E\,\bar\pi^{\,2}", "𝔼π¯2"),
    ],
)
def test_formulas_of_the_book(formula, signs):
    assert inside(formula) == inside(formula, True) == signs


def test_icons_are_drawn():
    page = with_icons(
        '<b><i class="theme-switch fa-solid fa-moon   fa-lg" data-mode="dark" title="Dark"></i></b>', LIBRARY
    )
    svg = BeautifulSoup(page, "html.parser").svg
    assert svg["class"] == ["theme-switch", "fa-moon", "fa-lg", "svg-inline--fa"]
    assert svg["data-mode"] == "dark" and svg["viewbox"] == "0 0 384 512" and svg.path["d"] == "M5 6"
    assert not svg.has_attr("title") and svg["aria-hidden"] == "true"
    assert "svg" in with_icons('<span class="fa-solid fa-angle-left"></span>', LIBRARY)
    with pytest.raises(ValueError, match="icon: expected one of Font Awesome's, got fa-boat"):
        with_icons('<i class="fas fa-boat"></i>', LIBRARY)


def test_what_browsers_stumble_over_is_mended():
    fold = (
        '<summary aria-label="Toggle hidden content">\n<p class="collapsed admonition-title">Code: the race</p>\n'
        '<p class="expanded admonition-title">Hide the code</p>\n</summary>'
    )
    assert mended(fold) == (
        '<summary><span class="collapsed">Code: the race</span><span class="expanded">Hide the code</span></summary>'
    )
    card = BeautifulSoup(
        mended('<div class="claim-card a b" id="claim-c"><p class="claim-head">d</p></div>'), "html.parser"
    )
    assert card.div["role"] == "group" and card.p["role"] == "heading" and card.div["aria-labelledby"] == card.p["id"]
    assert mended('<script defer src="a/scripts/fontawesome.js?d=1"></script>') == ""
    code = '<span class="n">a</span><span class="o">=</span><a><span class="n">b</span></a><span class="p">(</span>'
    assert mended(code) == 'a<span class="o">=</span><a>b</a>('


HEAD = """<link rel="stylesheet" href="_static/sphinx-design.min.css?v=6" />
<script src="_static/documentation_options.js"></script><script src="_static/doctools.js?v=9"></script>
<script>var togglebuttonSelector = '.toggle, .admonition.dropdown';</script>
<script src="_static/togglebutton.js"></script>
<script>DOCUMENTATION_OPTIONS.pagename = 'a';</script>"""


@pytest.mark.parametrize(
    ("body", "loaded"),
    [
        ('<p class="sidebar-toggle">', []),
        ('<p class="sd-card">', ["sphinx-design"]),
        ('<div class="admonition note dropdown">', ["togglebuttonSelector", "togglebutton.js"]),
        ('<div class="proof dropdown admonition">', ["togglebuttonSelector", "togglebutton.js"]),
    ],
)
def test_a_page_loads_what_it_needs_and_waits_for_no_script(body, loaded):
    page = with_light_head(f"{HEAD}{body}")
    for name in ("sphinx-design", "togglebuttonSelector", "togglebutton.js"):
        assert (name in page) == (name in loaded)
    head = BeautifulSoup(page, "html.parser")
    waiting = [script["src"] for script in head.select("script[src]:not([defer])")]
    assert waiting == ["_static/documentation_options.js"] and "_static/doctools.js?v=9" in page and "pagename" in page


def test_rules_for_icons_of_a_font_are_gone():
    kept = "a{b:c}.svg-inline--fa.fa-lg{d:e}.pst .fa-x{f:g}"
    assert ICON_RULE.sub("", f'/*!*/.fa,.fas{{h:i}}{kept}.fa-x:before{{--fa:"j"}}.fa-y::after{{k:l}}') == f"/*!*/{kept}"


def test_attributes_that_html_has_given_up_are_styles_or_gone():
    obsolete = (
        '<table border="1"><tr><th class="a" halign="left"><th rowspan="2" valign="top"></tr></table>'
        '<input type="search" autocorrect="off"><style scoped="">\ntd {}\n</style>'
    )
    assert mended(obsolete) == (
        '<table><tr><th class="a" style="text-align: left"><th rowspan="2" style="vertical-align: top"></tr></table>'
        '<input type="search">'
    )
    redirect = BeautifulSoup(mended('<meta http-equiv="Refresh" content="0; url=book/index.html" />\n'), "html.parser")
    assert redirect.title.text and redirect.html["lang"] == "en" and redirect.a["href"] == "book/index.html"
    assert redirect.find("meta", {"http-equiv": "refresh"})["content"] == "0; url=book/index.html"


def test_pictures_for_a_phone_become_files(tmp_path):
    page = (
        '<picture><source media="(max-width: 600px)" srcset="data:image/png;base64,YWJj"><img src="data:d"></picture>'
    )
    done = with_files(page, tmp_path, "../")
    name = done.partition('srcset="../_images/')[2].partition('"')[0]
    assert (tmp_path / "_images" / name).read_bytes() == b"abc" and 'src="data:d"' in done and "YWJj" not in done


def test_pictures_have_their_sizes(tmp_path):
    """Those in the page and those in files; one that has a size keeps it."""
    data = bytes.fromhex("89504e470d0a1a0a0000000d49484452") + (730).to_bytes(4) + (525).to_bytes(4) + b"more"
    (tmp_path / "a.png").write_bytes(data)
    inside = base64.b64encode(data).decode()
    page = f'<img alt="a" src="a.png"/><img src="data:image/png;base64,{inside}" alt="b"><img src="a.png" width="9">'
    sized = 'width="730" height="525"'
    assert with_sizes(page, tmp_path) == (
        f'<img {sized} alt="a" src="a.png"/><img {sized} src="data:image/png;base64,{inside}" alt="b">'
        '<img src="a.png" width="9">'
    )
