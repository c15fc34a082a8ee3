"""Build the book: execute the chapters, collect their verdict boxes, render the pages.

`python -m moe_book.build` is what `make book` runs; `--store` writes outputs back into the tree instead, of those
chapters whose inputs are not the ones that their stored outputs were made from. What has not changed is not run again.
"""

import argparse
import ast
import functools
import hashlib
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import nbformat

from moe_book import api, claims, pages, previews, search
from moe_book.decisions import decisions
from moe_book.experiments.catalogue import entries
from moe_book.finish import finish
from moe_book.glue import glued, put_in
from moe_book.notebooks import notebooks, page
from moe_book.sabotage.outcomes import by_claim, equivalents

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src"
RESULTS = SOURCES / "moe_book" / "results"
STATIC = ROOT / "book" / "_static"
SCRIPTS = ("explorables", "search")  # of some pages; those of _static are loaded by all
BUILD = ROOT / "_build"
EXECUTED, SOURCE, HTML = BUILD / "executed", BUILD / "source", BUILD / "html"
PACKAGES = ("moe_theory", "moe_book")
QUIET = ["--log-level=CRITICAL"]  # for kernels, which else print that they were told to end, once in some chapters


def chapters() -> list[Path]:
    """The notebooks of the book, in order, appendix pages last."""
    return notebooks(ROOT / "notebooks")


def executed(notebook: Path) -> Path:
    """Where a notebook lies once it is executed."""
    return EXECUTED / f"{page(notebook)}.ipynb"


def check_registries() -> None:
    """Read every registry, before anything is executed; ValueError names the file and the row of a slip."""
    for read in (claims.registry, entries, decisions, equivalents):
        read()


# --- what a chapter depends on ------------------------------------------------------------------


@functools.cache  # of the text, so that a file that changes is read anew
def _imported(source: str) -> frozenset[str]:
    """Names of modules of the packages, or their members, that a source imports; `.*` for all of a package's names."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {name for a in node.names for name in (a.name, f"{a.name}.*")}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    return frozenset(n for n in names if n.split(".")[0] in PACKAGES)


def _exports(package: Path) -> dict[str, str]:
    """The names that a package imports only when they are asked for, with their modules: its `EXPORTS`."""
    init = package / "__init__.py"
    return _table(init.read_text(encoding="utf-8")) if init.is_file() else {}


@functools.cache
def _table(source: str) -> dict[str, str]:
    body = ast.parse(source).body
    tables = (n.value for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "EXPORTS")
    return next(map(ast.literal_eval, tables), {})


def _files_of(name: str) -> set[Path]:
    """The module of that name, or of what a package exports under it, and the packages it lies in; may be empty."""
    package, *packages, last = [*name.split("."), ""] if name in PACKAGES else name.split(".")
    top = SOURCES / package
    table, found = _exports(top.joinpath(*packages)), set()
    for module in table.values() if last == "*" else [table.get(last, last)]:
        path = [*packages, *filter(None, module.split("."))]
        found |= {top.joinpath(*path[:i], "__init__.py") for i in range(len(path) + 1)}
        found.add(top.joinpath(*path).with_suffix(".py"))
    return {file for file in found if file.is_file()}


def _code_cells(notebook: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(notebook, 4).cells if cell.cell_type == "code"]


def _code(notebook: Path) -> str:
    return "\n".join(cell.source for cell in _code_cells(notebook))


def claimed(notebook: Path) -> list[dict]:
    """What a chapter can see of the claims it names; other claims, or their boxes, do not make it run again."""
    code = _code(notebook)
    named = (row for claim, row in claims.registry().items() if f'"{claim}"' in code)
    return [{field: value for field, value in row.items() if field not in claims.FOR_PAGES} for row in named]


def experimented(notebook: Path) -> dict[str, dict]:
    """The entries of the experiments that a chapter names."""
    code = _code(notebook)
    return {name: entry for name, entry in entries().items() if f'"{name}"' in code}


def dependencies(notebook: Path) -> set[Path]:
    """Every file a chapter's outputs depend on: itself, the modules it reaches and their data, rows, pins.

    The registries of claims and of experiments are not among them: see `claimed` and `experimented`.
    """
    code = _code(notebook)
    computing = {f"moe_book.experiments.{entry['module']}" for entry in experimented(notebook).values()}
    files, todo = set(), _imported(code) | computing
    while todo:
        fresh = set().union(*map(_files_of, todo)) - files
        files |= fresh
        todo = set().union(*(_imported(f.read_text(encoding="utf-8")) for f in fresh))
    stored = itertools.chain(RESULTS.glob("*.*"), (ROOT / "benchmarks" / "results").glob("*.*"))
    rows = {file for file in stored if f'"{file.stem}"' in code}
    data = {f.with_suffix(".yml") for f in files if f.stem != "claims"}
    return {notebook, ROOT / "requirements.lock"} | files | rows | {path for path in data if path.is_file()}


def fingerprint(notebook: Path) -> str:
    """Hash of a chapter's inputs; of the notebook itself only its code, for prose is not executed."""
    registered = json.dumps([claimed(notebook), experimented(notebook)])
    digest = hashlib.sha256(registered.encode())
    for path in sorted(dependencies(notebook)):
        text = path.read_bytes()
        if path == notebook:
            text = json.dumps([(c.id, c.source, c.metadata) for c in _code_cells(path)]).encode()
        digest.update(path.name.encode() + b"\0" + text)
    return digest.hexdigest()[:16]


def stored_inputs(notebook: Path) -> str:
    """The fingerprint that the outputs of a chapter in the tree were made from; empty if they do not say."""
    return nbformat.read(notebook, 4).metadata.get("moe_book", {}).get("inputs", "")


# --- executing ----------------------------------------------------------------------------------


def _clean(notebook: nbformat.NotebookNode, inputs: str) -> nbformat.NotebookNode:
    """Without timing and provenance metadata, but with the fingerprint of what its outputs were made from."""
    notebook.metadata = {k: notebook.metadata[k] for k in ("kernelspec", "language_info") if k in notebook.metadata}
    notebook.metadata["moe_book"] = {"inputs": inputs}
    notebook.metadata.get("language_info", {}).pop("version", None)
    for cell in notebook.cells:
        tags = [t for t in cell.metadata.get("tags", []) if t != "injected-parameters"]
        cell.metadata = {
            **{k: v for k, v in cell.metadata.items() if k == "mystnb"},
            **({"tags": tags} if tags else {}),
        }
    return notebook


def execute(notebook: Path) -> float:
    """Run one chapter with papermill into `_build/executed`; returns the seconds it took."""
    import papermill

    logging.getLogger("papermill").setLevel(logging.ERROR)
    start, inputs = time.perf_counter(), fingerprint(notebook)  # as they are now: what changes meanwhile is run again
    out = executed(notebook)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        # how a kernel cuts what a cell prints differs from run to run: joined again
        how = dict(kernel_name="python3", progress_bar=False, coalesce_streams=True, extra_arguments=QUIET)
        papermill.execute_notebook(notebook, out, cwd=ROOT, **how)
    except papermill.PapermillExecutionError as error:
        out.rename(out.with_suffix(".failed.ipynb"))
        raise SystemExit(f"{notebook.name}: {error}") from None
    out.with_suffix(".inputs").write_text(inputs + sys.version)
    return time.perf_counter() - start


def assemble(notebook: Path) -> None:
    """Leave in `_build/executed` the chapter as it is written now, with the outputs of its last execution."""
    out = executed(notebook)
    ran = {cell.id: cell for cell in _code_cells(out)}
    written = nbformat.read(notebook, 4)
    for cell in written.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = ran[cell.id].outputs, ran[cell.id].execution_count
    _put(out, (nbformat.writes(_clean(written, fingerprint(notebook))) + "\n").encode())


def execute_changed(chosen: list[Path]) -> None:
    """Run those of some chapters whose inputs changed, as many at a time as there are cores, one thread each."""
    EXECUTED.mkdir(parents=True, exist_ok=True)
    changed = []
    for notebook in chosen:
        stamp = executed(notebook).with_suffix(".inputs")
        if not stamp.exists() or stamp.read_text() != fingerprint(notebook) + sys.version:
            changed.append(notebook)
    print(f"== executing {len(changed)} of {len(chosen)} chapters", flush=True)
    os.environ.update(MOE_BOOK_STRICT="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYDEVD_DISABLE_FILE_VALIDATION="1")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        # the last chapter takes longest: were it not the first to start, one core would wait for it
        for notebook, seconds in zip(changed[::-1], pool.map(execute, changed[::-1]), strict=True):
            print(f"   {notebook.stem}: {seconds:.0f} s", flush=True)
    for notebook in chosen:
        assemble(notebook)


# --- rendering ----------------------------------------------------------------------------------


def _put(path: Path, data: bytes) -> None:
    """Write a file unless it holds these bytes already, so that Sphinx re-reads only what changed."""
    if not path.exists() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def stage(source: Path, config: str) -> dict:
    """Lay out everything Sphinx reads, generated pages included; returns the ledger."""
    ledger = claims.collect(map(executed, chapters()), by_claim())
    wanted = {"_config.yml": config.encode(), "_toc.yml": (ROOT / "_toc.yml").read_bytes()}
    boxes = pages.boxes(map(executed, chapters()))
    numbers = glued(map(executed, chapters()))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        scores = {row["id"]: row["sabotage"]["score"] for row in ledger["claims"] if row.get("sabotage")}
        shared = map(itertools.repeat, (boxes, numbers, scores))
        texts = pool.map(pages.presented, map(executed, chapters()), *shared)
        wanted |= {f"notebooks/{page(n)}.ipynb": text.encode() for n, text in zip(chapters(), texts, strict=True)}
    prose = {p.name: p.read_text(encoding="utf-8") for p in (ROOT / "book").glob("*.md")}
    wanted |= {f"_static/{p.relative_to(STATIC)}": p.read_bytes() for p in STATIC.rglob("*") if p.is_file()}
    wanted |= {f"{name}/{p.name}": p.read_bytes() for name in SCRIPTS for p in (ROOT / "book" / name).iterdir()}
    wanted["_static/front.png"] = pages.picture(EXECUTED)
    wanted["book/references.bib"] = (ROOT / "book" / "references.bib").read_bytes()
    generated = {**pages.generated(ledger, boxes), "api.md": api.page()}
    generated["_citations.md"] = pages.citations()
    wanted |= {f"book/{name}": put_in(text, numbers).encode() for name, text in {**prose, **generated}.items()}
    if source.exists():
        for stale in {p for p in source.rglob("*") if p.is_file()} - {source / w for w in wanted}:
            stale.unlink()
    for name, data in wanted.items():
        _put(source / name, data)
    return ledger


def render(source: Path, output: Path, config: str) -> None:
    """Render the staged book into `output` and put `ledger.json` beside its pages."""
    ledger = stage(source, config)
    files = sorted(p for p in source.rglob("*") if p.is_file())
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(source)).encode() + b"\0" + path.read_bytes())
    stamp = output.with_suffix(".rendered")
    if stamp.exists() and stamp.read_text() == digest.hexdigest() and (output / "index.html").exists():
        print(f"== {output} is up to date", flush=True)
        return
    print(f"== rendering {output}", flush=True)
    stamp.unlink(missing_ok=True)
    work = output.with_name(f"{output.name}-sphinx")
    command = [Path(sys.executable).with_name("jupyter-book"), "build", source, "--path-output", work]
    done = subprocess.run([*command, "--warningiserror", "--keep-going", "--quiet"], capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(work, ignore_errors=True)  # or pages already read would not be warned about again
        raise SystemExit(f"rendering failed:\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
    shutil.rmtree(output, ignore_errors=True)
    shutil.copytree(work / "_build" / "html", output)
    # Sphinx copies it with changed pages only
    shutil.copytree(source / "_static", output / "_static", dirs_exist_ok=True)
    shutil.copytree(source / "explorables", output / "explorables")
    search.install(output, source / "search")
    finish(output)
    previews.install(output)
    _put(output / "ledger.json", (json.dumps(ledger, indent=1, ensure_ascii=False) + "\n").encode())
    stamp.write_text(digest.hexdigest())


def store(chosen: list[Path]) -> None:
    """Copy executed outputs of some chapters into `notebooks/`, and the front page's picture if it is one of theirs."""
    for notebook in chosen:
        _put(notebook, executed(notebook).read_bytes())
        print(f"   stored: {notebook.stem}", flush=True)
    if pages.PICTURE[0] in {notebook.stem for notebook in chosen}:
        _put(ROOT / "book" / "_static" / "front.png", pages.picture(ROOT / "notebooks"))


def chosen(names: list[str]) -> list[Path]:
    """The chapters whose file names begin so, all for none; ValueError for a name of no chapter."""
    found = [n for n in chapters() if not names or n.stem.startswith(tuple(names))]
    if unknown := [name for name in names if not any(n.stem.startswith(name) for n in found)]:
        raise ValueError(f"--chapter: expected how the file of a chapter begins, such as 03, got {unknown}")
    return found


def main() -> None:
    """Entry point: execute the chapters that changed, then render the pages, or store their outputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", action="store_true", help="write the outputs of what changed back into the tree")
    parser.add_argument(
        "--chapter", action="append", default=[], metavar="03", help="store this chapter only; may be repeated"
    )
    options = parser.parse_args()
    start = time.perf_counter()
    try:
        check_registries()
        picked = chosen(options.chapter)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if options.store:
        changed = [n for n in picked if stored_inputs(n) != fingerprint(n)]
        execute_changed(changed)
        store(changed)
    else:
        execute_changed(chapters())
        render(SOURCE, HTML, (ROOT / "_config.yml").read_text())
        print(f"== open {HTML / 'index.html'}")
    print(f"== {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
