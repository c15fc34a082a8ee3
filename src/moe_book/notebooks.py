"""Where the book's notebooks lie, and what their pages are called.

A chapter is `notebooks/03_smooth_routing.ipynb`, its appendix page `notebooks/appendix/03_details.ipynb`. Both begin
with the chapter's number. The name of a page is its path there without the ending: `appendix/03_details`.
"""

from pathlib import Path

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
APPENDIX = "appendix"


def notebooks(folder: Path = NOTEBOOKS) -> list[Path]:
    """The chapters and other pages in order, then the appendix pages; empty where there is no such folder."""
    return [*sorted(folder.glob("*.ipynb")), *sorted((folder / APPENDIX).glob("*.ipynb"))]


def page(notebook: Path) -> str:
    """The name of a notebook's page."""
    return f"{APPENDIX}/{notebook.stem}" if notebook.parent.name == APPENDIX else notebook.stem


def label(name: str, folder: Path = NOTEBOOKS) -> str:
    """What numbers on a page begin with: `3` in chapter 3, `A3` in its appendix, nothing in a page without a number.

    Of several appendix pages of a chapter the second by name has `B3`, the third `C3`.
    """
    stem = name.split("/")[-1]
    number = stem[:2]
    if not number.isdigit():
        return ""
    if not name.startswith(f"{APPENDIX}/"):
        return f"{int(number)}"
    pages = sorted(path.stem for path in (folder / APPENDIX).glob(f"{number}_*.ipynb"))
    return f"{chr(ord('A') + (pages.index(stem) if stem in pages else 0))}{int(number)}"


def chapter(name: str) -> int:
    """The number of the chapter that a page is, or belongs to."""
    return int(name.split("/")[-1][:2])


def settling(row: dict, folder: Path = NOTEBOOKS) -> str:
    """The page that settles a claim: what its row of the registry says, else the chapter of its number; or nothing."""
    stems = (path.stem for path in sorted(folder.glob(f"{row['chapter']}_*.ipynb")))
    return row.get("page") or next(stems, "")
