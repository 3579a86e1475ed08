"""`python -m trainers.reporting.dashboard`."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from rollout import ConfigError
from rollout.telemetry.time_shares import PARTS
from trainers.reporting import dashboard

SHIPPED = Path(dashboard.__file__).parents[2] / "examples" / "dashboard.json"


def test_the_layout_is_written_without_wandb_or_torch(tmp_path):
    path = tmp_path / "panels.json"
    code = (
        "import sys; from trainers.reporting.dashboard import main; "
        f"main(['--json', {str(path)!r}]); print({{'wandb', 'torch', 'trl'}} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
    assert path.read_bytes() == SHIPPED.read_bytes()
    sections = json.loads(path.read_text())["sections"]
    *plotted, pictured = sections
    assert [section["name"] for section in plotted] == list(dashboard.SECTIONS)
    names = [y for section in plotted for panel in section["panels"] for y in panel["y"]]
    assert all(name.startswith(("train/rollout/", "train/sampling/")) for name in names)
    assert {f"train/rollout/time/{part}" for part in PARTS} <= set(names)
    assert {panel["x"] for section in plotted for panel in section["panels"]} == {dashboard.X}
    pictures = [key for panel in pictured["panels"] for key in panel["media_keys"]]
    assert pictures == [f"train/rollout/{name}" for name in ("timeline", "progress", "lengths")]


def test_the_layout_in_the_examples_is_todays():
    assert json.loads(SHIPPED.read_text(encoding="utf-8")) == dashboard.layout()


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(ConfigError, match=r"pip install 'twinslot\[dashboard\]'; --json FILE"):
        dashboard.main(["--project", "mine"])


def test_a_missing_folder_is_said_in_one_line(tmp_path):
    command = [sys.executable, "-m", "trainers.reporting.dashboard", "--json", tmp_path / "no/file"]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == f"ConfigError: {tmp_path}/no/file: there is no folder {tmp_path}/no\n"


@pytest.mark.parametrize("arguments", [[], ["--project", "mine", "--json", "file"]])
def test_it_goes_to_a_project_or_a_file(arguments, capsys):
    with pytest.raises(SystemExit):
        dashboard.main(arguments)
    assert "--project" in capsys.readouterr().err


@dataclass
class LinePlot:
    title: str
    x: str
    y: list[str]


@dataclass
class MediaBrowser:
    title: str
    media_keys: list[str]


@dataclass
class Section:
    name: str
    panels: list[LinePlot | MediaBrowser]
    is_open: bool


@dataclass
class Workspace:
    entity: str
    project: str
    name: str
    sections: list[Section]
    url: str = "https://wandb.example/mine"

    def save(self):
        SAVED.append(self)
        return self


SAVED: list[Workspace] = []


def test_every_panel_is_laid_out_in_the_project(monkeypatch, capsys):
    home, reports, spaces = (ModuleType(name) for name in ("w", "reports", "workspaces"))
    version = ModuleType("v2")
    version.LinePlot, version.MediaBrowser = LinePlot, MediaBrowser
    spaces.Section, spaces.Workspace = Section, Workspace
    modules = {"": home, ".reports": reports, ".reports.v2": version, ".workspaces": spaces}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"wandb_workspaces{name}", module)
    dashboard.main(["--project", "mine", "--entity", "me"])
    assert capsys.readouterr().out.strip() == "https://wandb.example/mine"
    (saved,) = SAVED
    assert (saved.entity, saved.project) == ("me", "mine")
    for section in saved.sections:
        kind = MediaBrowser if section.name == "Rollout pictures" else LinePlot
        assert {type(panel) for panel in section.panels} == {kind}
    found = {section.name: [p.title for p in section.panels] for section in saved.sections}
    wanted = {name: list(panels) for name, panels in dashboard.SECTIONS.items()}
    assert found == {**wanted, "Rollout pictures": list(dashboard.PICTURES)}
