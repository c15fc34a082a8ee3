"""Where notebooks lie, and what their pages are called."""

import pytest

from moe_book import claims, notebooks
from moe_book.sabotage.sources import chapter_of

CHAPTER, APPENDIX = "03_smooth_routing", "appendix/03_details"


def test_chapters_come_first_then_appendix_pages(tmp_path):
    (tmp_path / "appendix").mkdir()
    for name in ("04_b", "appendix/03_more", "03_a", "speed"):
        (tmp_path / f"{name}.ipynb").touch()
    found = notebooks.notebooks(tmp_path)
    assert [notebooks.page(path) for path in found] == ["03_a", "04_b", "speed", "appendix/03_more"]
    assert notebooks.notebooks(tmp_path / "none") == []


def test_numbers_of_a_page(tmp_path):
    names = [CHAPTER, APPENDIX, "speed", "book/index"]
    assert [notebooks.label(name) for name in names] == ["3", "A3", "", ""]
    (tmp_path / "appendix").mkdir()
    for name in ("03_details", "03_more", "13_other"):
        (tmp_path / "appendix" / f"{name}.ipynb").touch()
    both = [notebooks.label(f"appendix/{name}", tmp_path) for name in ("03_details", "03_more", "13_other")]
    assert both == ["A3", "B3", "A13"]
    assert notebooks.chapter(CHAPTER) == notebooks.chapter(APPENDIX) == 3


def test_a_claim_is_settled_on_the_page_of_its_row():
    assert notebooks.settling({"chapter": "03"}) == CHAPTER
    assert notebooks.settling({"chapter": "03", "page": APPENDIX}) == APPENDIX
    assert notebooks.settling({"chapter": "99"}) == ""
    for claim, row in claims.registry().items():
        place = row.get("page", chapter_of(claim))
        assert chapter_of(claim) == place and (notebooks.NOTEBOOKS / f"{place}.ipynb").is_file(), claim
        assert f'href="{place}.html#claim-{claim}"' in claims.link(claim)


@pytest.mark.parametrize("page", ["03_smooth_routing", "appendix/04_details", "appendix"])
def test_a_page_that_is_no_appendix_of_the_chapter_is_refused(page):
    row = {**claims.registry()["chen-lem-c.3"], "page": page}
    with pytest.raises(ValueError, match="^expected page to be an appendix page of chapter 03, got"):
        claims.validate(row)
