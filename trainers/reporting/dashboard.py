"""`python -m trainers.reporting.dashboard` adds W&B panels for the rollout metrics of a project."""

import argparse
import sys

from rollout.errors import ConfigError

X = "train/global_step"

# Section -> panel -> metrics as the trainer logs them. In W&B they are below `train/`.
SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "Rollout speed": {
        "tokens/s": ("rollout/effective_tok_s", "rollout/tok_s_per_gpu", "rollout/generated_tok_s"),
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
        "KV pages": ("rollout/kv_pages_used", "rollout/kv_pages_shared", "rollout/kv_pages_free"),
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

# Panel -> picture that a traced rollout writes; see `reporting/traces.py`.
PICTURES = {
    "host and device": "rollout/timeline",
    "rows and speed": "rollout/progress",
    "lengths": "rollout/lengths",
}


def _logged(metric: str) -> str:
    # TRL sends its own timings to W&B without the prefix.
    return metric if metric.startswith("profiling/") else f"train/{metric}"


def save(project: str, entity: str | None = None) -> str:
    """Add the panels to a W&B project as a workspace and return its URL.

    Args:
        entity: User or team; `None`: the default of the account that is logged in.

    Raises:
        ConfigError: wandb-workspaces is not installed.
    """
    try:
        from wandb_workspaces.reports.v2 import LinePlot, MediaBrowser
        from wandb_workspaces.workspaces import Section, Workspace
    except ImportError as error:
        raise ConfigError(
            "wandb-workspaces is not installed: pip install 'twinslot[dashboard]'"
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
    if not entity:
        import wandb  # here: needs an account

        entity = str(wandb.Api().default_entity)
    workspace = Workspace(
        entity=entity,
        project=project,
        name="Rollouts",
        sections=[Section(name=n, panels=each, is_open=True) for n, each in panels.items()],
    )
    return str(workspace.save().url)


def main(arguments: list[str]) -> None:
    """Parse the command line, add the panels and print the workspace's URL."""
    parser = argparse.ArgumentParser(prog="python -m trainers.reporting.dashboard")
    parser.add_argument("--project", required=True, help="W&B project that gets the panels")
    parser.add_argument("--entity", help="user or team of the project; default: your account's")
    options = parser.parse_args(arguments)
    sys.stdout.write(f"{save(options.project, options.entity)}\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:  # no traceback: the message says what to do
        sys.exit(f"{type(error).__name__}: {error}")
