"""What links show where one points."""

import json

from moe_book.previews import install, script

PAGE = """<html><article><p id="p">word</p><div class="proof theorem admonition" id="thm-a"><p class="admonition-title">
Theorem 1.1</p><section class="proof-content" id="proof-content"><p>Let <a href="#b">b</a> be<a class="headerlink"
href="#thm-a">#</a></p></section></div><div class="math" id="eq-a"><math></math></div></article></html>"""


def told(page, made):
    """What a script puts into the table of previews."""
    before, _, found = made.partition(" = ")
    assert before == f"previews[{json.dumps(page)}]" and found.endswith(";\n")
    return json.loads(found.removesuffix(";\n"))


def test_boxes_and_formulas_are_shown_without_addresses_and_links():
    found = told("book/a.html", script("book/a.html", PAGE))
    assert found.keys() == {"thm-a", "eq-a"}
    assert "id=" not in found["thm-a"] and "<a" not in found["thm-a"] and "Let b be</p>" in found["thm-a"]


def test_a_page_without_them_has_no_script(tmp_path):
    (tmp_path / "book").mkdir()
    (tmp_path / "notebooks" / "appendix").mkdir(parents=True)
    (tmp_path / "book" / "none.html").write_text("<article><p id='a'>word</p></article>")
    (tmp_path / "notebooks" / "appendix" / "some.html").write_text(PAGE)
    install(tmp_path)
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.js")] == [
        "previews/notebooks/appendix/some.js"
    ]
