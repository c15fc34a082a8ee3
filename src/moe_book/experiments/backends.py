"""Where rows are computed: each backend yields (key, row as JSON, None) or (key, None, traceback) as rows finish."""

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from itertools import islice

import torch
from joblib.externals.loky import ProcessPoolExecutor

from moe_book.devices import ROW

SCHEDULER = "MOE_THEORY_SCHEDULER"
OURS = {"device", "seconds", "provenance"}  # columns that no row function may name


def _attempt(row: Callable[[dict], dict], key: dict, device: str) -> tuple[dict, str | None, str | None]:
    torch.set_num_threads(1)
    start, before = time.perf_counter(), ROW.set(device)
    try:
        values = row(key)
        if both := sorted((key.keys() | OURS) & values.keys()):
            raise ValueError(f"row: expected no result under the name of a key or of {sorted(OURS)}, got {both}")
        kinds = bool | int | float | str | list
        if bad := {c: v for c, v in values.items() if not isinstance(v, kinds) or "\r" in str(v)}:
            raise ValueError(f"row: expected numbers, words without \\r, truth values or lists, got {bad}")
        seconds = round(time.perf_counter() - start, 1)
        return key, json.dumps({**key, **values, "device": device, "seconds": seconds}), None
    except Exception:
        return key, None, traceback.format_exc()
    finally:
        ROW.reset(before)


def _fetch(get: Callable[[], tuple], key: dict) -> tuple[dict, str | None, str | None]:
    """What a worker computed; a row whose worker died of it has failed."""
    try:
        return get()
    except Exception as error:
        return key, None, " ".join(f"{type(error).__name__}: {error}".split())


def _loky(row: Callable[[dict], dict], todo: list[dict], jobs: int, device: str) -> Iterator[tuple]:
    """As many pools of one process as rows at a time, so that a process that dies tells which row it died of."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    pool = partial(ProcessPoolExecutor, 1, timeout=60, env=one_thread)  # ends a minute after a run that was killed
    waiting, running, idle = iter(todo), {}, [pool() for _ in todo[:jobs]]
    try:
        while True:
            for key in islice(waiting, len(idle)):
                one = idle.pop()
                running[one.submit(_attempt, row, key, device)] = one, key
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                one, key = running.pop(future)
                idle.append(pool() if future.exception() else one)
                yield _fetch(future.result, key)
    finally:
        for one in [*idle, *(one for one, _ in running.values())]:
            one.shutdown(kill_workers=True)


# Dask is asked directly: joblib's backend for it waits without end for a row whose workers died until the
# scheduler gave it up.


def _dask(row: Callable[[dict], dict], todo: list[dict], jobs: int, device: str) -> Iterator[tuple]:
    try:
        from distributed import Client, KilledWorker, as_completed
    except ImportError:
        raise ValueError("backend: dask needs the package distributed; pip install 'moe-theory[cluster]'") from None
    local = dict(n_workers=jobs, threads_per_worker=1, memory_limit=0, dashboard_address=None)
    address = os.environ.get(SCHEDULER)
    try:
        client = Client(address) if address else Client(**local)
    except OSError as error:
        raise ValueError(f"{SCHEDULER}: no Dask scheduler can be reached at {address!r}: {error}") from None
    with client:
        submit = partial(client.submit, partial(_attempt, row, device=device), pure=False)
        futures, suspects = {submit(key): key for key in todo}, []
        for future in as_completed(futures):
            if isinstance(future.exception(), KilledWorker):
                suspects.append(futures[future])
            else:
                yield _fetch(future.result, futures[future])
        for key in suspects:  # once more, alone: rows that waited on the workers of another are suspects too
            yield _fetch(submit(key).result, key)


BACKENDS = {"loky": _loky, "dask": _dask}
