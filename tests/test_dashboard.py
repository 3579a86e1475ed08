"""`python -m trainers.reporting.dashboard`."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from rollout import ConfigError
from trainers.reporting import dashboard

SHARES = ("compute", "prefill", "tail", "sleep", "idle")


class Kind(SimpleNamespace):
    """Stands for any class of wandb-workspaces and keeps its arguments."""

    saved = None

    def save(self):
        type(self).saved = self
        return SimpleNamespace(url="https://wandb.example/mine")


@pytest.fixture
def workspaces(monkeypatch):
    """A fake wandb_workspaces with one class per kind of part."""
    kinds = {"reports.v2": ("LinePlot", "MediaBrowser"), "workspaces": ("Section", "Workspace")}
    made = {}
    for path in ("", "reports", *kinds):
        name = ".".join(filter(None, ("wandb_workspaces", path)))
        module = ModuleType(name)
        for kind in kinds.get(path, ()):
            made[kind] = type(kind, (Kind,), {})
            setattr(module, kind, made[kind])
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(**made)


def test_every_panel_is_laid_out_in_the_project(workspaces, capsys):
    dashboard.main(["--project", "mine", "--entity", "me"])
    assert capsys.readouterr().out.strip() == "https://wandb.example/mine"
    saved = workspaces.Workspace.saved
    assert (saved.entity, saved.project, saved.name) == ("me", "mine", "Rollouts")
    *plotted, pictured = saved.sections
    titles = {section.name: [panel.title for panel in section.panels] for section in plotted}
    assert titles == {name: list(panels) for name, panels in dashboard.SECTIONS.items()}
    panels = [panel for section in plotted for panel in section.panels]
    assert {type(panel) for panel in panels} == {workspaces.LinePlot}
    assert {panel.x for panel in panels} == {dashboard.X}
    names = [name for panel in panels for name in panel.y]
    assert len(names) == len(set(names))
    assert all(
        name.startswith(("train/rollout/", "train/sampling/", "profiling/")) for name in names
    )
    assert {f"train/rollout/time/{share}" for share in SHARES} <= set(names)
    assert {type(panel) for panel in pictured.panels} == {workspaces.MediaBrowser}
    pictures = [key for panel in pictured.panels for key in panel.media_keys]
    assert pictures == [f"train/rollout/{name}" for name in ("timeline", "progress", "lengths")]


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(ConfigError, match=r"pip install 'twinslot\[dashboard\]'"):
        dashboard.main(["--project", "mine"])


def test_it_needs_a_project_and_neither_torch_nor_wandb_to_say_so():
    code = (
        "import sys; from trainers.reporting.dashboard import main\n"
        "try: main([])\n"
        "finally: print({'wandb', 'torch', 'trl'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (2, "set()")
    assert "--project" in result.stderr
