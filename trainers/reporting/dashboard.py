"""`python -m trainers.reporting.dashboard`: W&B panels for what a training logs of its rollouts."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError

X = "train/global_step"

# Section -> panel -> metrics as the trainer logs them; W&B has them under `train/`.
SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "Rollout speed": {
        "tokens/s": (
            "rollout/effective_tok_s",
            "rollout/tok_s_per_gpu",
            "rollout/generated_tok_s",
        ),
        "share of a step": ("rollout/step_share",),
        "used of the GPU": ("rollout/gpu_busy", "rollout/mbu", "rollout/mfu"),
        "seconds": ("rollout/duration_s",),
        "rows live": ("rollout/rows_live", "rollout/overrun_rows"),
        "driver's counters": (
            "rollout/gpu_sm_active",
            "rollout/gpu_tensor_active",
            "rollout/gpu_dram_active",
            "rollout/gpu_nvml_utilization",
        ),
    },
    "Where the time goes": {
        "shares of a rollout": (
            "rollout/time/compute",
            "rollout/time/host_bound",
            "rollout/time/h2d_wait",
            "rollout/time/prefill",
            "rollout/time/padding",
            "rollout/time/tail",
            "rollout/time/sleep",
        ),
        "ms": ("rollout/wake_ms", "rollout/sleep_ms", "rollout/cast_weights_ms"),
        "graphs captured": ("rollout/graphs_captured",),
    },
    "Completions": {
        "tokens": (
            "rollout/length/mean",
            "rollout/length/p50",
            "rollout/length/p95",
            "rollout/length/max",
        ),
        "ended by": ("rollout/finished/stop", "rollout/finished/length"),
        "policy version": ("rollout/policy_version",),
    },
    "Rollout memory": {
        "KV pages": (
            "rollout/kv_pages_used",
            "rollout/kv_pages_shared",
            "rollout/kv_pages_free",
        ),
        "GiB": (
            "rollout/kv_mapped_gib",
            "rollout/released_gib",
            "rollout/offloaded_gib",
            "rollout/cast_weights_gib",
        ),
        "preemptions": ("rollout/preemptions",),
        "prompt tokens shared": ("rollout/prefix_hit_rate",),
    },
    "Rollout against trainer": {
        "|log-probability gap|": ("rollout/logp_gap", "rollout/logp_gap_max"),
        "by position": (
            "rollout/logp_gap/0-1K",
            "rollout/logp_gap/1-4K",
            "rollout/logp_gap/4-16K",
            "rollout/logp_gap/16K+",
        ),
        "ratio before clipping": (
            "sampling/raw_importance_sampling_ratio/mean",
            "sampling/raw_importance_sampling_ratio/max",
        ),
    },
}

# Panel -> what traced rollouts leave; see `traces`.
PICTURES = {
    "host and device": "rollout/timeline",
    "rows and speed": "rollout/progress",
    "lengths": "rollout/lengths",
}


def layout() -> dict[str, Any]:
    """The panels by section, as JSON has them: plots of metrics, and pictures."""
    sections = [
        {
            "name": name,
            "panels": [
                {"title": title, "x": X, "y": [f"train/{metric}" for metric in metrics]}
                for title, metrics in panels.items()
            ],
        }
        for name, panels in SECTIONS.items()
    ]
    pictures = [
        {"title": title, "media_keys": [f"train/{picture}"]} for title, picture in PICTURES.items()
    ]
    sections.append({"name": "Rollout pictures", "panels": pictures})
    return {"name": "Rollouts", "sections": sections}


def save(project: str, entity: str | None) -> str:
    """Lay the panels out in a W&B project; returns the address.

    Args:
        project: Its name.
        entity: User or team; `None`: the default of whoever is logged in.

    Raises:
        ConfigError: wandb-workspaces is not installed.
    """
    try:
        from wandb_workspaces.reports.v2 import LinePlot, MediaBrowser
        from wandb_workspaces.workspaces import Section, Workspace
    except ImportError as error:
        raise ConfigError(
            "laying out panels needs wandb-workspaces: pip install 'twinslot[dashboard]'; "
            "--json FILE writes them down without it"
        ) from error
    wanted = layout()
    sections = [
        Section(
            name=section["name"],
            panels=[
                MediaBrowser(**panel) if "media_keys" in panel else LinePlot(**panel)
                for panel in section["panels"]
            ],
            is_open=True,
        )
        for section in wanted["sections"]
    ]
    owner = entity or _default_entity()
    made = Workspace(entity=owner, project=project, name=wanted["name"], sections=sections)
    return str(made.save().url)


def _default_entity() -> str:
    import wandb  # needs an account

    return str(wandb.Api().default_entity)


def main(arguments: list[str]) -> None:
    """Read the command line, and save the layout in W&B or in a file.

    Raises:
        ConfigError: wandb-workspaces is not installed, or there is no folder for the file.
    """
    parser = argparse.ArgumentParser(prog="python -m trainers.reporting.dashboard")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--project", help="W&B project to lay the panels out in")
    where.add_argument("--json", type=Path, help="file to write them to, to be laid out by hand")
    parser.add_argument("--entity", help="user or team of the project")
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.parent.is_dir():
        raise ConfigError(f"{options.json}: there is no folder {options.json.parent}")
    if options.json is not None:
        options.json.write_text(json.dumps(layout(), indent=2) + "\n", encoding="utf-8")
    else:
        sys.stdout.write(f"{save(options.project, options.entity)}\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:  # its message says what to do, and a traceback hides it
        sys.exit(f"{type(error).__name__}: {error}")
