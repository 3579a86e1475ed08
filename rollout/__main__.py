"""`python -m rollout doctor` and `python -m rollout bench`."""

import sys

from rich.console import Console

from rollout.errors import RolloutError
from rollout.tools import bench, doctor
from rollout.tools import parity as difference

USAGE = """python -m rollout doctor            what the engine finds on this machine
python -m rollout doctor --exact    whether rollouts equal a trainer's forward, and if not, where
python -m rollout bench             how fast it decodes here; --help says more"""


def main(arguments: list[str]) -> None:
    """Run what the first argument names."""
    console = Console()
    match arguments:
        case ["doctor"]:
            doctor.report(console)
        case ["doctor", "--exact", *options]:
            difference.main(options, console)
        case ["bench", *options]:
            bench.main(options)
        case ["-h" | "--help"] | ["doctor", "-h" | "--help"]:
            console.print(USAGE)
        case _:
            console.print(USAGE)
            sys.stderr.write(f"no such command: {' '.join(arguments)}\n" if arguments else "")
            sys.exit(2)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RolloutError as error:  # its message says what to change, and a traceback hides it
        sys.exit(f"{type(error).__name__}: {error}")
