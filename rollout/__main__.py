"""`python -m rollout doctor` and `python -m rollout bench`."""

import sys

from rich.console import Console

from rollout.errors import RolloutError
from rollout.tools import bench, doctor, parity

USAGE = """python -m rollout doctor            show library versions, the GPU and the kernels in use
python -m rollout doctor --exact    compare a rollout with a trainer's forward, module by module
python -m rollout bench             measure decode speed on this machine; see bench --help"""


def main(arguments: list[str]) -> None:
    """Run the command that the first argument names."""
    console = Console()
    match arguments:
        case ["doctor"]:
            doctor.report(console)
        case ["doctor", "--exact", *options]:
            parity.main(options, console)
        case ["bench", *options]:
            bench.main(options)
        case ["-h" | "--help"] | ["doctor", "-h" | "--help"]:
            console.print(USAGE)
        case ["doctor", *options]:
            sys.stderr.write(
                f"doctor takes no {options[0]}; it belongs to: python -m rollout doctor --exact "
                f"{' '.join(options)}\n"
            )
            sys.exit(2)
        case _:
            console.print(USAGE)
            sys.stderr.write(f"unknown command: {' '.join(arguments)}\n" if arguments else "")
            sys.exit(2)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RolloutError as error:  # the message says what to change; a traceback would hide it
        sys.exit(f"{type(error).__name__}: {error}")
