"""Which code and which libraries made a stored result."""

import subprocess
from functools import partial
from importlib.metadata import version
from pathlib import Path

from moe_theory import __version__

PACKAGE = Path(__file__).parent
LIBRARIES = ("torch", "numpy", "scipy")
#: What a run itself writes does not make its code dirty.
STORED = (
    ":(exclude)results",
    ":(exclude)sabotage/outcomes",
    ":(top,exclude)benchmarks/results",
)


def commit() -> str:
    """The commit of the package's repository, `-dirty` if its files were edited since, `unknown` outside one."""
    try:
        git = partial(subprocess.check_output, cwd=PACKAGE, text=True, stderr=subprocess.DEVNULL)
        changed = git(["git", "status", "--porcelain", "--untracked-files=no", "--", ":/", *STORED])
        return git(["git", "describe", "--always"]).strip() + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def provenance() -> dict[str, str]:
    """Commit, and versions of this package and of the numerical libraries."""
    return {"moe_theory": __version__, "commit": commit(), **{name: version(name) for name in LIBRARIES}}
