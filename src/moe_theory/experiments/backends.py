"""Where rows are computed: each backend yields (key, row, None) or (key, None, traceback) as rows finish."""

import os
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import joblib
import torch

SCHEDULER = "MOE_THEORY_SCHEDULER"


def _attempt(row: Callable[[dict], dict], key: dict) -> tuple[dict, dict | None, str | None]:
    torch.set_num_threads(1)
    start = time.perf_counter()
    try:
        values = row(key)
        if both := sorted(key.keys() & values.keys()):
            raise ValueError(f"row: expected no result under the name of a key, got {both}")
    except Exception:
        return key, None, traceback.format_exc()
    return key, {**key, **values, "device": "cpu", "seconds": round(time.perf_counter() - start, 1)}, None


def _fetch(get: Callable[[], tuple], key: dict) -> tuple[dict, dict | None, str | None]:
    """What a cluster computed; a row that it gave up, because its workers died of it, has failed."""
    try:
        return get()
    except Exception:
        return key, None, traceback.format_exc()


def _loky(row: Callable[[dict], dict], todo: list[dict], jobs: int) -> Iterator[tuple]:
    tasks = (joblib.delayed(_attempt)(row, key) for key in todo)
    return joblib.Parallel(n_jobs=jobs, batch_size=1, return_as="generator_unordered")(tasks)


# Dask and Ray are asked directly: joblib's backend for Dask waits without end for a row whose workers
# died until the scheduler gave it up, and its backend for Ray hands over no row before all are computed.


def _dask(row: Callable[[dict], dict], todo: list[dict], jobs: int) -> Iterator[tuple]:
    try:
        from distributed import Client, as_completed
    except ImportError:
        raise ValueError("backend: dask needs the package distributed; pip install 'distributed>=2024.1'") from None
    local = dict(n_workers=jobs, threads_per_worker=1, memory_limit=0, dashboard_address=None)
    address = os.environ.get(SCHEDULER)
    try:
        client = Client(address) if address else Client(**local)
    except OSError as error:
        raise ValueError(f"{SCHEDULER}: no Dask scheduler can be reached at {address!r}: {error}") from None
    with client:
        futures = {client.submit(_attempt, row, key, pure=False): key for key in todo}
        for future in as_completed(futures):
            yield _fetch(future.result, futures[future])


def _ray(row: Callable[[dict], dict], todo: list[dict], jobs: int) -> Iterator[tuple]:
    try:
        import ray
    except ImportError:
        raise ValueError("backend: ray needs the package ray; pip install ray") from None
    with ray.init(num_cpus=None if os.environ.get("RAY_ADDRESS") else jobs):
        attempt = ray.remote(_attempt)
        pending = {attempt.remote(row, key): key for key in todo}
        while pending:
            (done,), _ = ray.wait(list(pending))
            yield _fetch(partial(ray.get, done), pending.pop(done))


BACKENDS = {"loky": _loky, "dask": _dask, "ray": _ray}
