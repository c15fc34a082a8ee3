"""The rendered book, and a browser without a network to read it with."""

import os
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[2]
HTML = ROOT / "_build" / "html"
#: Boxes of an article that scroll sideways and do not say so, or a page that does.
SILENT = """() => [...document.querySelectorAll('article *')].filter(e => e.clientWidth && e.checkVisibility()
    && e.scrollWidth > e.clientWidth + 4 && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX)
    && !e.classList.contains('scrolls')).map(e => `${e.tagName}.${e.className}`)
    .concat(document.documentElement.scrollWidth > innerWidth ? ['page'] : [])"""


@pytest.fixture(scope="session")
def browser():
    """Chromium with every request that leaves the machine refused by the browser itself."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("Chromium is not installed; .ci/run installs it")
        pytest.skip("Chromium is not installed")
    with sync_playwright() as play:
        chromium = play.chromium.launch(
            executable_path=path,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--host-resolver-rules=MAP * ~NOTFOUND",
            ],
        )
        yield chromium
        chromium.close()


def pytest_collection_modifyitems(items):
    """Put first what takes longest: were it last, one core would wait for it."""
    items.sort(key=lambda item: item.path.stem != "test_site")
