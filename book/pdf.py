"""One PDF of the rendered book, with its links: `python book/pdf.py`, which `make pdf` runs after `make book`.

The pages of `_build/html` become sections of one page, their anchors and the links between them renamed to that page,
and a headless Chromium prints it. Code cells stay folded away; solutions of exercises are open.
"""

import shutil
from pathlib import Path
from posixpath import dirname, join, normpath
from urllib.parse import unquote

import yaml
from bs4 import BeautifulSoup, Tag
from build import BUILD, HTML, ROOT

PDF = BUILD / "book.pdf"
DROPPED = "a.headerlink, details.hide, .cell.tag_hide-cell, form, nav, script"  # what paper has no use for
LOOK = """
@page { size: A4; margin: 18mm 16mm 20mm }
html { font-size: 10.5pt }
section.page { break-before: page }
article, .bd-article { display: block; max-width: none; padding: 0 }
figure, .claim-card, table { break-inside: avoid }
pre { white-space: pre-wrap }
div.math, mjx-container, .claim-card, .table-wrapper { overflow: visible !important }
"""
FOOT = """<div style="width:100%;font-size:8pt;text-align:center"><span class="pageNumber"></span></div>"""


def order() -> list[str]:
    """The pages as the table of contents has them, without endings."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    return [toc["root"], *(c["file"] for part in toc["parts"] for c in part["chapters"])]


def anchor(page: str, name: str = "") -> str:
    """What an anchor of a page is called in the whole."""
    return "--".join([page.replace("/", "-"), name] if name else [page.replace("/", "-")])


def relinked(href: str, page: str, names: set[str]) -> str | None:
    """Where a link of a page leads in the whole; None if that is not part of it, as the source of a function."""
    if "://" in href or href.startswith("mailto:"):
        return href
    path, _, name = href.partition("#")
    target = normpath(join(dirname(page), unquote(path.partition("?")[0]))).removesuffix(".html") if path else page
    return f"#{anchor(target, name)}" if target in names else None


def section(page: str, names: set[str], html: Path = HTML) -> Tag:
    """A page as a section of the whole."""
    article = BeautifulSoup((html / f"{page}.html").read_text(encoding="utf-8"), "html.parser").article
    for dropped in article.select(DROPPED):
        dropped.decompose()
    for element in article.select("[id]"):
        element["id"] = anchor(page, element["id"])
    for link in article.select("a[href]"):
        if (target := relinked(link["href"], page, names)) is None:
            link.unwrap()
        else:
            link["href"] = target
    for image in article.select("img[src]"):
        if not image["src"].startswith("data:"):
            image["src"] = (html / normpath(join(dirname(page), image["src"]))).as_uri()
    article.name, article["id"], article["class"] = "section", anchor(page), ["page", "bd-article"]
    return article


def joined(html: Path = HTML) -> str:
    """The whole book as one page, which finds style sheets and MathJax in the rendered one."""
    first = BeautifulSoup((html / f"{order()[0]}.html").read_text(encoding="utf-8"), "html.parser")
    names, head = set(order()), first.head
    for script in head.select("script"):
        if "mathjax" not in script.get("src", "") and "MathJax" not in script.text:
            script.decompose()
    for tag, name in (("link", "href"), ("script", "src")):
        for asset in head.select(f"{tag}[{name}]"):
            asset[name] = (html / normpath(join(dirname(order()[0]), asset[name].partition("?")[0]))).as_uri()
    style = first.new_tag("style")
    style.string = LOOK
    head.append(style)
    sections = "\n".join(str(section(page, names, html)) for page in order())
    return f'<!DOCTYPE html><html lang="en" data-theme="light">{head}<body>{sections}</body></html>'


def main() -> None:
    from playwright.sync_api import sync_playwright

    whole = BUILD / "book-in-one.html"
    whole.write_text(joined(), encoding="utf-8")
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium: expected it on the path, found none")
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(600_000)
        page.goto(whole.as_uri())
        page.evaluate("MathJax.startup.promise")
        how = dict(header_template="<span></span>", footer_template=FOOT, display_header_footer=True)
        page.pdf(path=PDF, prefer_css_page_size=True, outline=True, tagged=True, **how)
        browser.close()
    print(f"== open {PDF}")


if __name__ == "__main__":
    main()
