"""`python -m moe_book.sabotage list | run | status [CLAIM ...] | spotcheck SEED | score`."""

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

from moe_book.sabotage import outcomes
from moe_book.sabotage.population import SIZE, Mutant, chapters, control, population
from moe_book.sabotage.running import Outcome, at_once, attempted, traced
from moe_book.sabotage.sources import chapter_of

SPOTS = 40  # that continuous integration runs again
PORTION = 10  # mutants of each claim, before the next of any: what is done at any time is spread over all

Populations = dict[str, dict[str, list[Mutant]]]  # by chapter and claim
Traces = dict[str, list[dict]]


def _chosen(claims: list[str]) -> dict[str, list[str]]:
    """The claims that are named, or all, by chapter; ValueError for an id that is not in the registry."""
    for claim in claims:
        chapter_of(claim)
    by_chapter = {chapter: [c for c in ids if not claims or c in claims] for chapter, ids in chapters().items()}
    return {chapter: ids for chapter, ids in by_chapter.items() if ids}


def traces(names: list[str], jobs: int) -> Traces:
    """What each cell of some chapters executes: as stored where that holds, else watched now."""
    found = {chapter: trace for chapter in names if (trace := outcomes.stored_trace(chapter)) is not None}
    stale = [chapter for chapter in names if chapter not in found]
    for chapter, trace in tqdm(at_once([(traced, (c,)) for c in stale], jobs), total=len(stale), unit="trace"):
        if isinstance(trace, str):
            raise ValueError(f"{chapter}: expected a chapter that runs, got {trace}")
        outcomes.store_trace(chapter, trace)
        found[chapter] = trace
    return found


def drawn(chosen: dict[str, list[str]], watched: Traces) -> Populations:
    """The population of each claim."""
    return {chapter: {c: population(c, watched[chapter]) for c in ids} for chapter, ids in chosen.items()}


def _tasks(populations: Populations, watched: Traces, wanted: Callable[[str, str], bool]) -> list[tuple]:
    """What is to be run of that which is wanted, by claim and key, a portion of every claim after another."""
    found = []
    for start in range(0, SIZE, PORTION):
        for chapter, by_claim in populations.items():
            todo = []
            for claim, mutants in by_claim.items():
                mine = [m for m in mutants[start : start + PORTION] if wanted(claim, m.key)]
                todo += [control(claim), *mine] if mine else []
            if todo:
                found.append((attempted, (chapter, todo, [cell["seconds"] for cell in watched[chapter]])))
    return found


def _outcomes(tasks: list[tuple], jobs: int, unfit: list[str]) -> Iterator[Outcome]:
    """Outcomes of mutants as they come; what makes a chapter or a claim unfit to be judged is noted."""
    total = sum(len(arguments[1]) for _, arguments in tasks)
    with tqdm(total=total, unit="run", mininterval=5) as bar:
        for found in at_once(tasks, jobs):
            if not isinstance(found, Outcome):
                unfit += [f"{found[0]}: {found[1]}"] if found[1] else []
                continue
            bar.update()
            if found.key != control(found.claim).key:
                yield found
            elif found.outcome != "survived":
                unfit.append(f"{found.claim} does not stand unchanged: {found.why}")


def run(claims: list[str], jobs: int) -> int:
    """Run what has no outcome that holds, storing each as it ends; 1 if a chapter or a claim could not be judged."""
    start, chosen, unfit = time.perf_counter(), _chosen(claims), []
    watched = traces(list(chosen), jobs)
    populations = drawn(chosen, watched)
    known = {c: outcomes.current(c) for ids in chosen.values() for c in ids}
    by_key = {(m.claim, m.key): m for ids in populations.values() for ms in ids.values() for m in ms}
    tasks = _tasks(populations, watched, lambda claim, key: key not in known[claim])
    for o in _outcomes(tasks, jobs, unfit):
        chapter, m = chapter_of(o.claim), by_key[o.claim, o.key]
        known[o.claim][o.key] = outcomes.row(m, o.outcome, o.why, o.seconds)
        outcomes.store(chapter, {o.claim: populations[chapter][o.claim]}, known[o.claim], watched[chapter])
    print("\n".join(unfit) or f"all run, {time.perf_counter() - start:.0f} s")
    return 1 if unfit else 0


def spotcheck(seed: str, jobs: int) -> int:
    """Run forty mutants again that a seed chooses; 1 if one that was refused survives, or a claim cannot be judged."""
    rows = outcomes.table()
    keys = list(zip(rows.claim, rows.key, strict=True))
    spots = set(random.Random(seed).sample(keys, min(SPOTS, len(keys))))
    chosen = _chosen(sorted({claim for claim, _ in spots})) if spots else {}
    watched, unfit = traces(list(chosen), jobs), []
    tasks = _tasks(drawn(chosen, watched), watched, lambda *mutant: mutant in spots)
    stored = dict(zip(keys, rows.outcome, strict=True))
    worse, seen = [], 0
    for o in _outcomes(tasks, jobs, unfit):
        seen += 1
        if stored.get((o.claim, o.key)) == "refused" and o.outcome == "survived":
            worse.append(f"{o.claim} {o.key} was refused and survives")
    print("\n".join([*unfit, *worse, f"{seen} mutants run again, {len(worse)} that were refused survive"]))
    return 1 if unfit or worse else 0


def status(claims: list[str]) -> int:
    """Print how many mutants of each claim have an outcome that holds, and its survivors; 1 if some claim has none."""
    rows, lacking = outcomes.table(), 0
    by_claim = {claim: mine.to_dict("records") for claim, mine in rows.groupby("claim")}
    for claim in (claim for ids in _chosen(claims).values() for claim in ids):
        mine = by_claim.get(claim, [])
        lacking += not mine
        print(f"{claim}: {len(mine)} run, {sum(m['outcome'] == 'refused' for m in mine)} refused")
        for m in (m for m in mine if m["outcome"] == "survived"):
            print(f"    survived: {m['key']} {m['kind']}, {m['operator']}, {m['place']}: {m['what']}")
    print(f"{len(rows)} mutants have an outcome that holds, {lacking} claims have none")
    return 1 if lacking else 0


def show_scores() -> int:
    """Print the score of each claim by kind, and of each operator; always 0."""
    rows = outcomes.table()
    print(outcomes.score(rows).round(0).to_string(na_rep=""))
    print(outcomes.by_operator(rows).round(0).to_string(na_rep=""))
    return 0


def show_list(claims: list[str], jobs: int) -> int:
    """Print what each mutant changes."""
    chosen = _chosen(claims)
    for by_claim in drawn(chosen, traces(list(chosen), jobs)).values():
        for claim, mutants in by_claim.items():
            print(claim)
            for m in mutants:
                print(f"    {m.key} {m.kind}, {m.operator}, {m.place}: {m.what}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 1 if something is not as it must be, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m moe_book.sabotage", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="what each mutant of some claims, or of all, changes")
    running = commands.add_parser("run", help="run those of some claims, or all, that have no outcome that holds")
    spots = commands.add_parser("spotcheck", help=f"run {SPOTS} again and compare with what is stored")
    known = commands.add_parser("status", help="what became of them, and who survived")
    commands.add_parser("score", help="refused over refused and survived, by claim and by operator")
    for command in (listing, running, known):
        command.add_argument("claims", nargs="*", metavar="CLAIM")
    spots.add_argument("seed", metavar="SEED", help="any text, such as a commit; it chooses them")
    for command in (listing, running, spots):
        command.add_argument("--jobs", type=int, default=os.cpu_count(), help="run at the same time")
    options = parser.parse_args(arguments)
    try:
        if getattr(options, "jobs", 1) < 1:
            raise ValueError(f"jobs: expected an integer >= 1, got {options.jobs}")
        if options.command == "list":
            return show_list(options.claims, options.jobs)
        if options.command == "run":
            return run(options.claims, options.jobs)
        if options.command == "spotcheck":
            return spotcheck(options.seed, options.jobs)
        return status(options.claims) if options.command == "status" else show_scores()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
