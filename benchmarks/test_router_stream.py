"""`RouterStream` and `keep_probability` on one thread, and where torch has two while another process holds a core.

What a token costs at least is a selection and a count: beside the stream stands what one writes in numpy for loads,
`argpartition` and `bincount`, and the `bincount` of numbers that are there. A token of M = 64 has 256 bytes of logits
in single precision. Waiting for a thread is no work of the processor, so these times are those of the clock, each the
least of some rounds; ratios are within one run.
"""

import pickle
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from moe_theory.diagnose import RouterStream
from moe_theory.theory.kept_sets import keep_probability

SIZES = [(8, 2), (64, 8), (256, 8)]
TOKENS, ASKED, ROUNDS = 65_536, 1_000, 5


def by_numpy(h, k):
    """Loads of the k largest logits."""
    return np.bincount(np.argpartition(h, -k, axis=1)[:, -k:].ravel(), minlength=h.shape[1])


def least(function, *args, rounds=ROUNDS):
    """Seconds of the clock, the least of some rounds after one that is not timed."""
    function(*args)
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        function(*args)
        found.append(time.perf_counter() - start)
    return min(found)


@contextmanager
def two_threads_and_a_busy_core():
    """Two threads for torch, while another process holds a core."""
    threads = torch.get_num_threads()
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        other.kill()
        other.wait()


@pytest.mark.parametrize(("M", "k"), SIZES)
def test_router_streams(record, request, M, k):
    timed = request.config.getoption("benchmark_enable")
    tokens = TOKENS if timed else 500
    h = torch.randn(tokens, M, generator=torch.Generator().manual_seed(0))
    stream, numbers = RouterStream(M, k), h.topk(k).indices.numpy()
    stream.add(h)
    assert stream.report().loads == pytest.approx(by_numpy(h.numpy(), k) / (tokens * k))
    if not timed:
        return
    some = h[:ASKED].double()

    def both():
        add = least(stream.add, h) / tokens
        return add, least(lambda: keep_probability(some, k, scale=0.01), rounds=2) / ASKED

    add, kept = both()
    with two_threads_and_a_busy_core():
        busy_add, busy_kept = both()
    selected, counted = least(by_numpy, h.numpy(), k) / tokens, least(np.bincount, numbers.ravel()) / tokens
    record.setdefault("router_stream", {})[f"{M}, {k}"] = dict(
        add_us=1e6 * add,
        add_busy_us=1e6 * busy_add,
        numpy_us=1e6 * selected,
        bincount_us=1e6 * counted,
        times_numpy=add / selected,
        times_busy=busy_add / add,
        keep_us=1e6 * kept,
        keep_times_busy=busy_kept / kept,
        kept_MB=len(pickle.dumps(stream)) / 1e6,
    )
    record["router_stream_sizes"] = dict(tokens=TOKENS, asked=ASKED, rounds=ROUNDS)
