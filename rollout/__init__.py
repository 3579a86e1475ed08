"""The public names. `RolloutEngine` is imported on first use, because it imports torch."""

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
    """Import the engine on first use (PEP 562)."""
    if name != "RolloutEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rollout.engine import RolloutEngine

    return RolloutEngine
