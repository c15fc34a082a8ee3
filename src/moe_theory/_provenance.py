"""Which code and which libraries made a stored result."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

from moe_theory import __version__

ROOT = Path(__file__).parents[2]
LIBRARIES = ("torch", "numpy", "scipy")


def commit() -> str:
    """The commit of the package's repository, `-dirty` if its code was edited since, `unknown` outside one."""
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def provenance() -> dict[str, str]:
    """Commit, and versions of Python, this package and the numerical libraries."""
    versions = {name: version(name) for name in LIBRARIES}
    return {"commit": commit(), "python": platform.python_version(), "moe_theory": __version__, **versions}
