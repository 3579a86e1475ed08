"""The wheel holds every file of both packages, and the installed modules import."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rollout", "trainers")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
OFFLINE = ("--quiet", "--no-deps", "--no-index")
IMPORT_EACH = """
import importlib, sys
for name in sys.argv[2:]:
    assert importlib.import_module(name).__file__.startswith(sys.argv[1]), name
"""


def files_of(folder):
    files = (path for package in PACKAGES for path in (folder / package).rglob("*.*"))
    return {path.relative_to(folder) for path in files if path.suffix in (".py", ".typed")}


def run(*command, **options):
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, result.stderr


def test_the_wheel_holds_every_file_and_its_modules_import(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(*PIP, "wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", tmp_path, source)
    (wheel,) = tmp_path.glob("*.whl")
    run(*PIP, "install", *OFFLINE, "--no-compile", "--target", target, wheel)
    assert files_of(target) == files_of(ROOT)
    modules = [
        ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(files_of(target))
        if path.suffix == ".py" and (find_spec("triton") or not path.stem.endswith("_triton"))
    ]
    environment = {**os.environ, "PYTHONPATH": str(target)}
    run(sys.executable, "-c", IMPORT_EACH, target, *modules, cwd=tmp_path, env=environment)
