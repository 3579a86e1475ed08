"""Run scripts as a user starts them, each in a fork of one process that has imported everything.

Importing torch, transformers and TRL takes several times as long as a toy run of an example.
"""

import json
import os
import runpy
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path


def run_all(folder: Path, modules: list[str], commands: dict[str, list], environment: dict):
    """Run `commands`, name -> (script, arguments), one after another, each in `folder`/name.

    `modules` are imported before the first fork. Returns name -> result, as `subprocess.run` does.
    """
    for name in commands:
        (folder / name).mkdir()
    wanted = {name: list(map(str, command)) for name, command in commands.items()}
    (folder / "commands.json").write_text(json.dumps([modules, wanted]))
    command = [sys.executable, __file__, str(folder)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    status = json.loads((folder / "status.json").read_text())
    return {
        name: subprocess.CompletedProcess(
            wanted[name], status[name], *((folder / name / f"{n}.txt").read_text() for n in (1, 2))
        )
        for name in commands
    }


def _run(folder: Path, script: str, *arguments: str) -> int:
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(os.open(f"{stream}.txt", os.O_WRONLY | os.O_CREAT), stream)
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(end.code)
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _main(folder: Path) -> None:
    modules, commands = json.loads((folder / "commands.json").read_text())
    for module in modules:
        import_module(module)
    status = {}
    for name, command in commands.items():
        process = os.fork()
        if process == 0:
            code = _run(folder / name, *command)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        status[name] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    (folder / "status.json").write_text(json.dumps(status))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
