"""The door: what we promise to keep.

It is lazy, so that importing the host half imports no torch.

Read in this order: request, scheduler, slots, forward, engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.config import RolloutConfig
    from rollout.engine import RolloutEngine
    from rollout.errors import (
        ConfigError,
        EngineBusy,
        EngineClosed,
        EnginePaused,
        OutOfMemory,
        OutOfPages,
        RequestError,
        RolloutError,
        Unsupported,
        UnsupportedModel,
        UnsupportedTrainer,
    )
    from rollout.request import Completion, FinishReason, Request
    from rollout.sampling_params import SamplingParams
    from rollout.stop_strings import StopStrings

__all__ = [
    "Completion",
    "ConfigError",
    "EngineBusy",
    "EngineClosed",
    "EnginePaused",
    "FinishReason",
    "OutOfMemory",
    "OutOfPages",
    "Request",
    "RequestError",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutError",
    "SamplingParams",
    "StopStrings",
    "Unsupported",
    "UnsupportedModel",
    "UnsupportedTrainer",
]

_HOMES = {
    "RolloutConfig": "config",
    "RolloutEngine": "engine",
    "Completion": "request",
    "FinishReason": "request",
    "Request": "request",
    "SamplingParams": "sampling_params",
    "StopStrings": "stop_strings",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
