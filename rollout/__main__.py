"""`python -m rollout doctor`: what the engine finds on this machine."""

import argparse

from rich.console import Console

from rollout.doctor import report


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m rollout", description=__doc__)
    parser.add_argument("command", choices=["doctor"])
    parser.parse_args()
    report(Console())


if __name__ == "__main__":
    main()
