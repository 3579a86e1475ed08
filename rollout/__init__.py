"""The door: what we promise to keep.

The engine is imported on first use, so that importing the host half imports no torch.

Read in this order: request, scheduler, slots, forward, engine.
"""

from typing import TYPE_CHECKING, Any

from rollout.config import EngineConfig
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

if TYPE_CHECKING:
    from rollout.engine import RolloutEngine

__all__ = [
    "Completion",
    "ConfigError",
    "EngineBusy",
    "EngineClosed",
    "EngineConfig",
    "EnginePaused",
    "FinishReason",
    "OutOfMemory",
    "OutOfPages",
    "Request",
    "RequestError",
    "RolloutEngine",
    "RolloutError",
    "SamplingParams",
    "StopStrings",
    "Unsupported",
    "UnsupportedModel",
    "UnsupportedTrainer",
]


def __getattr__(name: str) -> Any:
    """Import the engine, and torch with it, on first use (PEP 562)."""
    if name != "RolloutEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rollout.engine import RolloutEngine

    return RolloutEngine
