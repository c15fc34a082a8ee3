"""`python -m moe_book.experiments list | status | run NAME [--profile P] [--jobs N] [--backend B] [--device D]`."""

import argparse
import os
import sys

from moe_book.devices import NAMES
from moe_book.experiments import EXPERIMENTS, PROFILES, run, status
from moe_book.experiments.store import BACKENDS


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status, 1 if rows failed or a store is refused by `status`, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m moe_book.experiments", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="names and descriptions")
    commands.add_parser("status", help="rows stored, rows in the grid, seconds the stored rows took")
    running = commands.add_parser("run", help="compute the rows that are missing")
    running.add_argument("name", metavar="NAME")
    running.add_argument("--profile", choices=PROFILES, default="paper", help="the full grid or a small one")
    running.add_argument("--jobs", type=int, default=os.cpu_count(), help="rows computed at the same time")
    running.add_argument("--backend", choices=BACKENDS, default="loky", help="this machine, or a cluster")
    running.add_argument("--device", choices=NAMES, default="cpu", help="where rows are computed; cuda: on a GPU")
    options = parser.parse_args(arguments)
    try:
        if options.command == "list":
            for name, about in EXPERIMENTS.abouts().items():
                print(f"{name}: {about}")
        elif options.command == "status":
            stores = status()
            print(stores.to_string(index=False))
            return int((stores["stored"] == "refused").any())
        else:
            names = ("jobs", "backend", "profile", "device")
            run(options.name, **{name: getattr(options, name) for name in names})
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
