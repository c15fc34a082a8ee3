"""No comparison reaches across two data sets: chapters run where their data are missing, or of another release."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_project import DATA_OF

from moe_book import claims
from moe_book.notebooks import NOTEBOOKS
from moe_theory.tasks import characters

#: By what is there in place of the data: chapters, and the lines of their boxes that are then not computed.
LEFT_OUT = {
    "none": {
        "08": {"chen-tab-2": 1, "chen-tab-12": 1, "dikkala-exp-images": 1},
        "13": {"dikkala-fig-5": 1},
        "19": {"smooth-fig-3-cnn": 1},
        "24": {"nguyen-tab-2": 1, "nguyen-tab-3": 1},
        "25": {"book-router-clusters": 1},
        "26": {},
    },
    "other": {"08": {"chen-tab-12": 1}, "13": {"dikkala-fig-5": 1}, "24": {"nguyen-tab-2": 1}, "26": {}},
}


def test_all_chapters_that_read_data_are_tried():
    assert {*LEFT_OUT["none"]} == {f"{n:02}" for n in DATA_OF["images"] | DATA_OF["pages"]}
    assert {*LEFT_OUT["other"]} == {f"{n:02}" for n in DATA_OF["pages"]}


@pytest.mark.slow
@pytest.mark.parametrize(("there", "chapter"), [(there, c) for there in LEFT_OUT for c in LEFT_OUT[there]])
def test_boxes_stand_without_the_data_of_the_stored_rows(there, chapter):
    if there == "other" and not characters.manual_pages():
        pytest.skip("no manual pages on this machine")
    script, strict = Path(__file__).with_name("elsewhere_data.py"), {"MOE_BOOK_STRICT": "1", "MPLBACKEND": "agg"}
    env = {name: value for name, value in os.environ.items() if name != "MOE_THEORY_DATA"} | strict
    found = {}
    for path in sorted(NOTEBOOKS.rglob(f"{chapter}_*.ipynb")):  # the chapter and its appendix page
        run = subprocess.run([sys.executable, script, path, there], capture_output=True, text=True, env=env)
        assert run.returncode == 0, run.stderr[-2_000:]
        boxes = re.findall(r"^box (\S+) (\d+)$", run.stdout, re.MULTILINE)
        found |= {claim: int(left) for claim, left in boxes}
    assert {claim: left for claim, left in found.items() if left} == LEFT_OUT[there][chapter]
    assert found.keys() == {c for c, row in claims.registry().items() if row["chapter"] == chapter and "verdict" in row}
