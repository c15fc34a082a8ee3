"""Run chapters at other seeds and name the boxes that fall: `python -m moe_book.seeds [SEED ...] [--chapter 03]`.

A box that holds only at the seed it was written with stood on luck. Exits with 1 if one falls.
Without a seed each runs at its own.
"""

import argparse
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from moe_book.build import QUIET, ROOT, chosen


def fallen(notebook: Path, seed: int | None) -> list[str]:
    """Cells that fail at a seed, the chapter's own for None: the claim they settle, or their id, and the error."""
    nb = nbformat.read(notebook, 4)
    (parameters,) = [c for c in nb.cells if "parameters" in c.metadata.get("tags", [])]
    parameters.source += f"\nseed = {seed}" if seed is not None else ""
    how = dict(kernel_name="python3", extra_arguments=QUIET, resources={"metadata": {"path": str(ROOT)}})
    NotebookClient(nb, timeout=600, allow_errors=True, **how).execute()
    found = []
    for cell in nb.cells:
        for error in (o for o in cell.get("outputs", []) if o.output_type == "error"):
            claim = re.search(r'claims\.check\(\s*"([^"]+)"', cell.source)
            found.append(f"{claim[1] if claim else cell.id}: {error.ename}: {error.evalue[:300]}")
    return found


def main() -> int:
    """Entry point: run the chapters at each seed and print the boxes that fall."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="*", metavar="SEED")
    parser.add_argument("--chapter", action="append", default=[], metavar="03", help="this chapter only; repeatable")
    options = parser.parse_args()
    os.environ.update(MOE_BOOK_STRICT="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYDEVD_DISABLE_FILE_VALIDATION="1")
    tasks, total = list(product(chosen(options.chapter), options.seeds or [None])), 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for (notebook, seed), found in zip(tasks, pool.map(fallen, *zip(*tasks, strict=True)), strict=True):
            print("\n    ".join([f"{notebook.stem}, seed {seed}: {len(found)} fall", *found]), flush=True)
            total += len(found)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
