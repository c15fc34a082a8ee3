"""Run notebooks one after the other, each in an empty folder: `python run_copies.py FOLDER [CHAPTER ...]`.

Prints what each took and the errors it shows, and exits with 1 if there are any. Boxes are strict, as in the build.
Needs nothing but nbclient, for it runs where the book's tools are not.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

PACKAGE = "moe-theory"


def errors(path: Path) -> list[str]:
    """What stops cells of a notebook."""
    notebook = nbformat.read(path, 4)
    with tempfile.TemporaryDirectory() as folder:
        how = dict(timeout=900, kernel_name="python3", allow_errors=True, extra_arguments=["--log-level=CRITICAL"])
        NotebookClient(notebook, resources={"metadata": {"path": folder}}, **how).execute()
        left = [f"left in the folder: {name}" for name in os.listdir(folder)]
    outputs = [(cell.id, o) for cell in notebook.cells for o in cell.get("outputs", []) if o.output_type == "error"]
    return left + [f"{cell}: {o.ename}: {o.evalue[:300]}" for cell, o in outputs]


if __name__ == "__main__":
    os.environ.update(MOE_BOOK_STRICT="1", PYDEVD_DISABLE_FILE_VALIDATION="1")
    folder, *chapters = sys.argv[1:]
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "-q", "-y", PACKAGE], check=True)  # the first installs it
    failed = False
    for path in sorted(Path(folder).rglob("*.ipynb")):
        if not chapters or path.name[:2] in chapters:
            began, found = time.monotonic(), errors(path)
            print(f"{path.stem}: {time.monotonic() - began:.0f} s", *found, sep="\n    ", flush=True)
            failed = failed or bool(found)
    sys.exit(failed)
