"""A step of `train_patch_moe` against other ways to take it, against its own growth, and against the machine.

One thread, float32, n = 16,000 examples, P = 4 patches in d = 50 dimensions, M = 8 experts of J = 16
filters, unless a test says otherwise. What the work needs, whatever the program: 26 million operations
in the router and 51 million in the experts, and 6.5 MB read once. The program as written does 84 million
and moves 47 MB (`parts.counted`). All that is compared is measured in turns, round after round, and
times are the processor's for the measuring thread, without the turns that other programs took. No test
asserts a time. `make bench` stores the numbers in `results/speed.json`; the page "How
fast, and how far from the machine's limit" shows them.
"""

import multiprocessing
import time

import machine
import numpy as np
import parts
import pytest
import steps
import torch
from steps import STEPS, D, J, K, M, N, P

from moe_theory.training import train_patch_moe

ROUNDS = 24
SIZES = [(n, M) for n in (32, 1000, 2000, 4000, 8000, N, 32_000)] + [(N, m) for m in (2, 4, 16, 32, 64)]


@pytest.fixture
def rounds(request):
    """How often everything is timed; once without `--benchmark-enable`."""
    return ROUNDS if request.config.getoption("benchmark_enable") else 1


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_the_same_step(name, n=400):
    """In float64 and at equal noise, the step is the first one of `train_patch_moe` to 1e-10 of its length."""
    if not STEPS[name].runs:
        pytest.skip("torch.compile needs a C++ compiler")
    p = steps.problem(n, dtype=torch.float64)
    (run,) = train_patch_moe(p.batch, p.batch, steps=1, filters=J, sigma_0=steps.SIGMA_0)
    step = STEPS[name].make(p, steps.drawn_by((M, n), p.W)())
    assert abs(step() - run.history[0]["loss"]) <= 1e-10
    for start, ours, theirs in zip((p.theta(), p.W), run.parameters.values(), step.state, strict=True):
        assert (ours - theirs).abs().max() <= 1e-10 * (ours - start).abs().max()


def product(size):
    a, b, out = torch.ones(3, size, size)
    return lambda: torch.mm(a, b, out=out)


def copy(floats):
    a, b = torch.ones(floats), torch.ones(floats)
    return lambda: b.copy_(a)


#: Limits of the machine: what is timed, and how many operations, bytes or draws it holds.
CEILINGS = {
    "large product": (product(1024), 2 * 1024**3),
    "copy in memory": (copy(2**24), 2 * parts.FLOAT * 2**24),
    "copy of the noise patches": (copy(N * D), 2 * parts.FLOAT * N * D),
    "copy of the logits": (copy(N * M), 2 * parts.FLOAT * N * M),
    "draws": (steps.drawn_by((M, N), torch.ones(1)), N * M),
}


def test_steps(record, rounds):
    """Every implementation, the engine at every size and part by part, and the limits: one run, in turns."""
    takers = {name: s.make(steps.problem()) for name, s in STEPS.items() if s.runs}
    at = {size: steps.engine_step(steps.problem(*size)) for size in SIZES}
    timed = {name: (step, None) for name, step in takers.items() if name != "engine"}
    timed |= {(size, part): (step, end) for size, step in at.items() for part, end in parts.BOUNDARIES.items()}
    timed |= {name: (call, None) for name, (call, _) in CEILINGS.items()}
    took = {name: 1e3 * s for name, s in parts.interleaved(timed, rounds).items()}
    took["engine"] = took[(N, M), "update"]
    ms = {name: float(np.median(t)) for name, t in took.items()}

    growth = {size: parts.increments({part: ms[size, part] for part in parts.BOUNDARIES}) for size in SIZES}
    rate = {name: 1e-6 * amount / ms[name] for name, (_, amount) in CEILINGS.items()}
    fastest = max(r for name, r in rate.items() if name.startswith("copy"))
    counts = parts.counted(N, M, J, D, P, K)
    record["sizes"] = dict(n=N, M=M, J=J, d=D, P=P, rounds=rounds)
    record["steps"] = {
        name: {"told": s.told, "ms": ms.get(name), "quartiles": np.quantile(took[name], (0.25, 0.75)).tolist()}
        if s.runs
        else {"told": s.told, "ms": None, "quartiles": None}
        for name, s in STEPS.items()
    }
    record["growth"] = [
        {"n": n, "M": m, "ms": ms[(n, m), "update"], "curves": parts.curves(growth[n, m])} for n, m in SIZES
    ]
    record["ceilings"] = rate
    record["work"] = parts.work(growth[N, M], counts, rate["large product"], fastest)
    record["needed"] = dict(zip(("operations", "bytes"), parts.needed(N, M, J, D, P), strict=True))


def one_of_many(barrier, answers, count):
    """A process that takes `count` steps on one thread as soon as all the others are ready."""
    torch.set_num_threads(1)
    step = steps.engine_step(steps.problem())
    for _ in range(5):
        step()
    barrier.wait()
    start = time.perf_counter()
    for _ in range(count):
        step()
    answers.put(time.perf_counter() - start)


def at_once(processes: int, count: int) -> float:
    """Seconds until the slowest of so many processes has taken its steps."""
    spawn = multiprocessing.get_context("spawn")
    barrier, answers = spawn.Barrier(processes), spawn.Queue()
    running = [spawn.Process(target=one_of_many, args=(barrier, answers, count)) for _ in range(processes)]
    for process in running:
        process.start()
    slowest = max(answers.get(timeout=120) for _ in running)
    for process in running:
        process.join()
    return slowest


def on_threads(step, threads: int, count: int) -> float:
    """Seconds of `count` steps, the calls of each split over so many threads."""
    torch.set_num_threads(threads)
    try:
        step()
        start = time.perf_counter()
        for _ in range(count):
            step()
        return time.perf_counter() - start
    finally:
        torch.set_num_threads(1)


def test_all_cores(record, rounds):
    """The cores given to runs, and given to one run: by the clock on the wall, against one thread."""
    cores, count, step = machine.cores(), 2 * rounds, steps.engine_step(steps.problem())
    turns = [
        [at_once(k, count) for k in (1, cores)] + [on_threads(step, k, count) for k in (1, cores)] for _ in range(3)
    ]
    alone, together, one, split = np.median(turns, axis=0)
    record["cores"] = {"cores": cores, "given to runs": cores * alone / together, "given to one run": one / split}
