"""`python -m moe_book.sabotage list | run [CLAIM ...] [--jobs N] | spotcheck SEED | status`."""

import argparse
import os
import random
import sys
import time

from tqdm import tqdm

from moe_book.provenance import provenance
from moe_book.sabotage import registry
from moe_book.sabotage.registry import Mutant, mutants, outcomes
from moe_book.sabotage.running import Branch, Task, attempts

SPOTS = 12


def tasks(chosen: list[Mutant]) -> list[Task]:
    """The processes that run some mutants: for each claim one that branches, and one for each changed module."""
    found = []
    for claim in dict.fromkeys(m.claim for m in chosen):
        own = [m for m in chosen if m.claim == claim]
        cells = registry.cells_for(claim, own[0].chapter)
        branches = tuple(_branch(m, cells) for m in own if not m.of_module)
        found.append(Task(claim, cells, branches=branches))
        found += [_of_module(m, cells) for m in own if m.of_module]
    return found


def _of_module(m: Mutant, cells: tuple[str, ...]) -> Task:
    return Task(m.id, cells, module=registry.module(m.place), source=registry.changed(m))


def _branch(m: Mutant, cells: tuple[str, ...]) -> Branch:
    """The claim's cells from the first that a mutant touches: a changed cell, or one that names the experiment."""
    if m.place == "notebook":
        changed = tuple(new if old else "" for old, new in zip(cells, registry.changed(m), strict=False))
        start = next((i for i, (old, new) in enumerate(zip(cells, changed, strict=True)) if old != new), len(cells) - 1)
        return Branch(m.id, changed, start)
    experiment = m.place.removeprefix("rows ")
    start = next((i for i, cell in enumerate(cells) if f'"{experiment}"' in cell), 0)
    return Branch(m.id, cells, start, experiment, m.do)


def _bad(outcome: str, survives: str) -> bool:
    """Whether a check is worth less than it says: only a mutant with a stated reason may survive."""
    return not (outcome.startswith("refused") or (outcome == "survived" and survives))


def run(chosen: list[Mutant], jobs: int) -> int:
    """Run mutants, storing what became of each as it ends; 1 if one survives that must not, or is broken."""
    if registry.outdated():
        print(
            "boxes are judged otherwise than when outcomes were stored: these are dropped; run all",
            file=sys.stderr,
        )
    start, made_by, known, everyone = time.perf_counter(), provenance(), outcomes(), mutants()
    by_id, unfit, bad, refused = {m.id: m for m in chosen}, [], [], 0
    todo = tasks(chosen)
    total = len(chosen) + len({m.claim for m in chosen})
    for o in tqdm(attempts(todo, jobs), total=total, unit="run", mininterval=5):
        if o.id not in by_id:
            if o.outcome != "survived":
                unfit.append(f"{o.id} does not pass unchanged, its mutants say nothing: {o.by}: {o.why}")
            continue
        m = by_id[o.id]
        known[m.id] = dict(outcome=o.outcome, by=o.by, why=o.why, seconds=o.seconds, digest=m.digest(), **made_by)
        registry.store(known, everyone)
        refused += o.outcome.startswith("refused")
        if _bad(o.outcome, m.survives):
            bad.append(f"{o.outcome}: {m.id}: {m.what} {o.why}")
    print("\n".join([*unfit, *bad, f"{refused} of {len(chosen)} refused, {time.perf_counter() - start:.0f} s"]))
    return 1 if unfit or bad else 0


def spotcheck(seed: str, jobs: int) -> int:
    """Run a dozen mutants chosen by `seed`; 1 if one ends otherwise than stored or, if none is, survives."""
    known, everyone = outcomes(), mutants()
    chosen = random.Random(seed).sample(everyone, min(SPOTS, len(everyone)))
    off, by_id, claims = 0, {m.id: m for m in chosen}, {m.claim for m in chosen}
    todo = [task for task in tasks(chosen) if task.module or task.branches]  # unchanged chapters run elsewhere
    for o in attempts(todo, jobs):
        if o.id in claims:
            continue
        m, before = by_id[o.id], known.get(o.id, {})
        stored = before["outcome"] if before.get("digest") == m.digest() else "not run"
        print(f"{o.id}: {o.outcome}" + (f", stored as {stored}: {o.by} {o.why}" if o.outcome != stored else ""))
        off += _bad(o.outcome, m.survives) if stored == "not run" else o.outcome != stored
    print(f"{len(chosen) - off} of {len(chosen)} mutants end as they must")
    return 1 if off else 0


def status() -> int:
    """Print a line for each claim; 1 if a mutant survives, is broken or was not run, or a claim lacks mutants."""
    bad, total = 0, 0
    for claim, rows in registry.outcomes_by_claim().items():
        refused = sum(r["outcome"].startswith("refused") for r in rows)
        print(f"{claim}: {refused} of {len(rows)} refused")
        for r in rows:
            if not r["outcome"].startswith("refused"):
                reason = f" ({r['survives']})" if r["survives"] else ""
                print(f"    {r['outcome']}: {r['name']}: {r['what']}{reason}")
            bad += _bad(r["outcome"], r["survives"])
        total += len(rows)
    for claim, kinds in registry.lacking().items():
        print(f"{claim}: no {' and no '.join(kinds)} mutant")
        bad += 1
    print(f"{total} mutants, {bad} that must not stay so")
    return 1 if bad else 0


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 1 if a check is worth less than it says, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m moe_book.sabotage", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="what each mutant changes")
    commands.add_parser("status", help="what became of them")
    running = commands.add_parser("run", help="run those of some claims, or all, and store what became of them")
    running.add_argument("claims", nargs="*", metavar="CLAIM")
    spots = commands.add_parser("spotcheck", help=f"run {SPOTS} and compare with what is stored")
    spots.add_argument("seed", metavar="SEED", help="any text, such as a commit; it chooses them")
    for command in (running, spots):
        command.add_argument("--jobs", type=int, default=os.cpu_count(), help="run at the same time")
    options = parser.parse_args(arguments)
    try:
        if options.command == "list":
            for m in mutants():
                print(f"{m.id} ({m.kind}, {m.place}): {m.what}")
            return 0
        if options.command == "status":
            return status()
        if options.jobs < 1:
            raise ValueError(f"jobs: expected an integer >= 1, got {options.jobs}")
        if options.command == "run":
            return run(mutants(options.claims), options.jobs)
        return spotcheck(options.seed, options.jobs)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
