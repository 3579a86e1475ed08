"""`python -m trainers.reporting.dashboard`: W&B panels for what a training logs of its rollouts."""

import argparse
import sys

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
        "TRL's own timings, seconds": (
            "profiling/Time taken: GRPOTrainer._prepare_inputs",
            "profiling/Time taken: GRPOTrainer.vLLM.generate",
            "profiling/Time taken: GRPOTrainer._calculate_rewards",
            "profiling/Time taken: GRPOTrainer.compute_loss",
        ),
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
            "rollout/time/prefill",
            "rollout/time/tail",
            "rollout/time/sleep",
            "rollout/time/idle",
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

# Panel -> picture that traced rollouts leave; see `reporting/traces.py`.
PICTURES = {
    "host and device": "rollout/timeline",
    "rows and speed": "rollout/progress",
    "lengths": "rollout/lengths",
}


def _logged(metric: str) -> str:
    """A metric's name in W&B: TRL logs its timings itself, past the trainer's prefix."""
    return metric if metric.startswith("profiling/") else f"train/{metric}"


def save(project: str, entity: str | None = None) -> str:
    """Lay the panels out in a W&B project; returns the address.

    Args:
        project: Its name.
        entity: User or team; `None`: the default of the account that is logged in.

    Raises:
        ConfigError: wandb-workspaces is not installed.
    """
    try:
        from wandb_workspaces.reports.v2 import LinePlot, MediaBrowser
        from wandb_workspaces.workspaces import Section, Workspace
    except ImportError as error:
        raise ConfigError(
            "the panels need wandb-workspaces: pip install 'twinslot[dashboard]'"
        ) from error
    panels = {
        name: [
            LinePlot(title=title, x=X, y=[_logged(metric) for metric in metrics])
            for title, metrics in section.items()
        ]
        for name, section in SECTIONS.items()
    }
    panels["Rollout pictures"] = [
        MediaBrowser(title=title, media_keys=[f"train/{picture}"])
        for title, picture in PICTURES.items()
    ]
    workspace = Workspace(
        entity=entity or _default_entity(),
        project=project,
        name="Rollouts",
        sections=[Section(name=n, panels=each, is_open=True) for n, each in panels.items()],
    )
    return str(workspace.save().url)


def _default_entity() -> str:
    import wandb  # needs an account

    return str(wandb.Api().default_entity)


def main(arguments: list[str]) -> None:
    """Read the command line, and lay the panels out in W&B.

    Raises:
        ConfigError: wandb-workspaces is not installed.
    """
    parser = argparse.ArgumentParser(prog="python -m trainers.reporting.dashboard")
    parser.add_argument("--project", required=True, help="W&B project to lay the panels out in")
    parser.add_argument("--entity", help="user or team of the project")
    options = parser.parse_args(arguments)
    sys.stdout.write(f"{save(options.project, options.entity)}\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:  # its message says what to do, and a traceback hides it
        sys.exit(f"{type(error).__name__}: {error}")
