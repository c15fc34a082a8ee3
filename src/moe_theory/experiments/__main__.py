"""`python -m moe_theory.experiments list | status | run NAME [--jobs N]`."""

import argparse
import os
import sys

from moe_theory.experiments import EXPERIMENTS, run, status


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m moe_theory.experiments", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="names and descriptions")
    commands.add_parser("status", help="rows stored and rows in the grid")
    running = commands.add_parser("run", help="compute the rows that are missing")
    running.add_argument("name", metavar="NAME")
    running.add_argument("--jobs", type=int, default=os.cpu_count(), help="rows computed at the same time")
    options = parser.parse_args(arguments)
    try:
        if options.command == "list":
            for e in EXPERIMENTS.values():
                print(f"{e.name}: {e.about}")
        elif options.command == "status":
            print(status().to_string(index=False))
        else:
            run(options.name, options.jobs)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
