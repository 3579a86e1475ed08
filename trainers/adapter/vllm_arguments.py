"""TRL's arguments for vLLM that have no effect on the engine, and what stands in for them."""

import logging
from dataclasses import MISSING, fields
from typing import Any

logger = logging.getLogger(__name__)

_NO_SERVER = "there is no server"
WITHOUT_EFFECT = {
    "vllm_gpu_memory_utilization": "set RolloutConfig(kv_fraction=...), a share of the free memory",
    "vllm_enable_sleep_mode": "RolloutConfig(kv_keep='rollout'), the default, gives memory back",
    "vllm_tensor_parallel_size": "each process has the whole model on its own GPU",
    "vllm_model_impl": "rollouts run the trainer's own modules",
    "vllm_server_base_url": _NO_SERVER,
    "vllm_server_host": _NO_SERVER,
    "vllm_server_port": _NO_SERVER,
    "vllm_server_timeout": _NO_SERVER,
    "vllm_group_port": _NO_SERVER,
}


def log_without_effect(args: Any) -> None:
    """Log the arguments that a user set for vLLM and that change nothing here."""
    ignored = [
        f"{field.name}={getattr(args, field.name)!r} ({WITHOUT_EFFECT[field.name]})"
        for field in fields(args)
        if field.name in WITHOUT_EFFECT and getattr(args, field.name) != _default(field)
    ]
    if ignored:
        logger.warning("without vLLM these arguments have no effect: %s", ", ".join(ignored))


def _default(field: Any) -> Any:
    return field.default_factory() if field.default is MISSING else field.default
