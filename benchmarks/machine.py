"""What the numbers were measured on."""

import os
import platform
import subprocess
from pathlib import Path

import torch

CPU = Path("/sys/devices/system/cpu/cpu0/cache")


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def caches() -> dict[str, str]:
    """Level and size of the first core's data caches, as Linux reports them."""
    found = {}
    for index in sorted(CPU.glob("index*")):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction":
            found[f"L{level}"] = size
    return found


def model() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def describe() -> dict:
    """The machine, the libraries, and how busy it was before the first measurement."""
    return {
        "cpu": model(),
        "cores": cores(),
        "caches": caches(),
        "memory_GiB": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
    }


def code() -> str:
    """The commit that was measured, marked if the tree had changes."""
    command = ["git", "describe", "--always", "--dirty", "--tags"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
