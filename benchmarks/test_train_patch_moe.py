"""`train_patch_moe` against two other ways to take the same step, against its own growth, and against the machine.

One thread, float32, n = 16,000 examples, P = 4 patches in d = 50 dimensions, M = 8 experts of J = 16
filters, unless a test says otherwise. Times of one thread are the processor's: what that thread
computed, without the turns that other programs took; where several threads or processes run, the
clock on the wall counts. No test asserts a time. `make bench` stores the numbers in
`src/moe_theory/results/speed.json`; the page "How fast, and how far from the machine's limit" shows them.
"""

import multiprocessing
import time

import machine
import parts
import pytest
import steps
import torch
from steps import D, J, M, N, P

from moe_theory.training import train_patch_moe

ONE_THREAD = {"timer": time.thread_time}
ROUNDS = {"engine": 200, "readable": 60, "dense": 30}
SOURCE = torch.Generator().manual_seed(0)


def same_step(variant: str, name: str, n: int = 400) -> bool:
    """Whether, in float64 and at equal noise, the step is the first one of `train_patch_moe` to 1e-10 of its length."""
    p = steps.problem(n, variant=variant, dtype=torch.float64)
    (run,) = train_patch_moe(p.batch, p.batch, steps=1, filters=J, variant=variant, sigma_0=steps.SIGMA_0)
    step = steps.STEPS[name](p, torch.rand(M, n, generator=SOURCE.manual_seed(steps.SEED), dtype=torch.float64))
    right = abs(step() - run.history[0]["loss"]) <= 1e-10
    for start, ours, theirs in zip((p.theta(), p.W), run.parameters.values(), step.state, strict=True):
        right &= bool((ours - theirs).abs().max() <= 1e-10 * (ours - start).abs().max())
    return right


@pytest.mark.benchmark(group="one step of Algorithm 1, n = 16,000, M = 8", **ONE_THREAD)
@pytest.mark.parametrize(("variant", "name"), steps.COMPARED)
def test_one_step(seconds, record, variant, name):
    assert same_step(variant, name)
    took = seconds(steps.STEPS[name](steps.problem(variant=variant)), ROUNDS[name])
    record.setdefault("steps", {}).setdefault(variant, {})[name] = 1e3 * took


SIZES = [("n", n, M) for n in (1000, 2000, 4000, 8000, 16_000, 32_000)] + [("M", N, m) for m in (2, 4, 8, 16, 32, 64)]


@pytest.mark.benchmark(group="growth of the engine's step", **ONE_THREAD)
@pytest.mark.parametrize(("axis", "n", "experts"), SIZES)
def test_growth(seconds, record, axis, n, experts):
    """A step at other sizes, and its parts timed inside further steps."""
    step = steps.engine_step(steps.problem(n, experts))
    whole = 1e3 * seconds(step, rounds=60)
    inside, calls = parts.taken_apart(step, rounds=60)
    row = {"n": n, "M": experts, "step_ms": whole, "curves_ms": parts.curves(inside), "torch_calls": calls}
    record.setdefault("growth", {}).setdefault(axis, []).append(row)
    if axis == "M" and experts == M:
        record["work"] = parts.work(whole, inside, parts.counted(n, experts, J, D, P))


@pytest.mark.benchmark(group="the same calls with almost nothing to compute", **ONE_THREAD)
def test_floor(seconds, record):
    """A step on 4M examples: what its calls cost before they compute anything."""
    record["floor"] = {"n": 4 * M, "step_ms": 1e3 * seconds(steps.engine_step(steps.problem(4 * M)), rounds=200)}


def draw(*shape):
    return torch.rand(*shape, generator=SOURCE)


def large_product():
    a, b, out = draw(2048, 2048), draw(2048, 2048), draw(2048, 2048)
    return lambda: torch.mm(a, b, out=out)


def expert_products(blocks=8):
    """Forward products of the step, (2000 x 50) @ (50 x 16), on so many blocks of rows, 8 times in all."""
    rows, W, Z = draw(blocks, N // M, D), draw(M, J, D), draw(blocks, N // M, J)

    def products():
        for m in range(M):
            torch.mm(rows[m % blocks], W[m].T, out=Z[m % blocks])

    return products


def expert_products_back():
    rows, S = draw(M, N // M, D), draw(M, N // M, J)
    return lambda: [s.T @ x for s, x in zip(S, rows, strict=True)]


def router_product():
    theta, total = draw(D, M), draw(N, D)
    return lambda: theta.T @ total.T


def router_product_back():
    to_h, total = draw(M, N), draw(N, D)
    return lambda: to_h @ total


def copy(floats):
    a, b = draw(floats), draw(floats)
    return lambda: b.copy_(a)


PRODUCTS = {  # what is timed, and its floating-point operations
    "large product": (large_product, 2 * 2048**3),
    "expert products": (expert_products, 2 * N * D * J),
    "expert products, one block of rows for all": (lambda: expert_products(1), 2 * N * D * J),
    "expert products, back": (expert_products_back, 2 * N * D * J),
    "router product": (router_product, 2 * N * D * M),
    "router product, back": (router_product_back, 2 * N * D * M),
}
OF_A_STEP = ["expert products", "expert products, back", "router product", "router product, back"]
COPIES = {"copy in memory": 2**26, "copy of the noise patches": N * D, "copy of the logits": N * M}
ELSEWHERE = torch.empty(2**25)


def emptied_caches():
    """Writes 128 MiB, so that what is read next comes from memory."""
    ELSEWHERE.fill_(1.0)


@pytest.mark.benchmark(group="ceilings: products", **ONE_THREAD)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(seconds, record, name):
    make, operations = PRODUCTS[name]
    took = seconds(make(), rounds=10 if name == "large product" else 200)
    record.setdefault("ceilings", {}).setdefault("GFLOP_per_s", {})[name] = operations / took / 1e9


@pytest.mark.benchmark(group="ceilings: products of arguments that are in no cache", **ONE_THREAD)
@pytest.mark.parametrize("name", OF_A_STEP)
def test_products_from_memory(seconds, record, name):
    make, operations = PRODUCTS[name]
    took = seconds(make(), rounds=50, before=emptied_caches)
    record.setdefault("ceilings", {}).setdefault("GFLOP_per_s_from_memory", {})[name] = operations / took / 1e9


@pytest.mark.benchmark(group="ceilings: copies, read and written", **ONE_THREAD)
@pytest.mark.parametrize("name", COPIES)
def test_copies(seconds, record, name):
    took = seconds(copy(COPIES[name]), rounds=20 if name == "copy in memory" else 500)
    record.setdefault("ceilings", {}).setdefault("GB_per_s", {})[name] = 2 * parts.FLOAT * COPIES[name] / took / 1e9


@pytest.mark.benchmark(group="ceilings: routing noise", **ONE_THREAD)
def test_draws(seconds, record):
    """Uniform numbers from torch's generator, which draws one after another."""
    record.setdefault("ceilings", {})["million_draws_per_s"] = N * M / seconds(lambda: draw(M, N), rounds=200) / 1e6


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


@pytest.mark.benchmark(group="the whole machine, 300 steps in each process")
@pytest.mark.parametrize("processes", sorted({1, machine.cores()}))
def test_all_cores(benchmark, record, processes, count=300):
    """As many runs at once as there are cores. The printed time has start-up and data in it, the stored one has not."""
    slowest = benchmark.pedantic(at_once, args=(processes, count), rounds=1)
    row = {"processes": processes, "ms_per_run_and_iteration": 1e3 * slowest / count / processes}
    record.setdefault("throughput", []).append(row)


@pytest.mark.benchmark(group="one step of Algorithm 1 on all cores")
def test_one_run_on_all_cores(seconds, record):
    """The other use of the cores: one run, its calls split over threads."""
    torch.set_num_threads(machine.cores())
    try:
        took = seconds(steps.engine_step(steps.problem()), rounds=100)
    finally:
        torch.set_num_threads(1)
    record["one_run_on_all_cores"] = {"threads": machine.cores(), "step_ms": 1e3 * took}
