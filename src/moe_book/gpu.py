"""Run every chapter on a machine with a GPU and record how it went: `python -m moe_book.gpu`, or `make gpu`.

Chapters that pick a device run on the GPU and again on the CPU, the others once; all strictly, as the build runs them.
The record is `benchmarks/results/gpu.json`, of which the page on running makes a table.
"""

import json
import os
import sys
import time
from datetime import UTC, datetime

import torch

from moe_book import manifest
from moe_book.devices import NAMES, VARIABLE
from moe_book.notebooks import notebooks, page
from moe_book.pages import GPU_RECORD
from moe_book.seeds import fallen
from moe_book.speed import RESULTS


def picks(source: str) -> bool:
    """Whether a chapter with this source picks a device."""
    return "device = pick_device()" in source


def main() -> int:
    """Entry point; returns 1 where a box falls on the GPU."""
    if not torch.cuda.is_available():
        print("error: expected a GPU that torch can use, found none", file=sys.stderr)
        return 2
    os.environ["MOE_BOOK_STRICT"] = "1"
    rows = []
    for path in notebooks():
        row = {"chapter": page(path), "gpu": picks(path.read_text(encoding="utf-8")), "seconds": {}, "fallen": {}}
        for name in NAMES if row["gpu"] else NAMES[:1]:
            os.environ[VARIABLE], began = name, time.monotonic()
            row["fallen"][name] = fallen(path, None)
            row["seconds"][name] = round(time.monotonic() - began, 1)
        print(row["chapter"], row["seconds"], *row["fallen"].values(), flush=True)
        rows.append(row)
    about = dict(card=torch.cuda.get_device_name(), torch=torch.__version__, date=f"{datetime.now(UTC):%Y-%m-%d}")
    record = json.dumps({**about, "chapters": rows}, indent=1) + "\n"
    manifest.write(GPU_RECORD, record.encode(), RESULTS)
    return int(any(any(row["fallen"].values()) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
