"""RolloutConfig: the engine's knobs, and two that only the trainer reads."""

import re
from dataclasses import dataclass, field

from rollout.config import VLLM_NAMES, EngineConfig
from rollout.errors import ConfigError, check_choice, refuse_unknown

_TRACE = re.compile("off|last|every:[1-9][0-9]*")


@refuse_unknown(ConfigError, VLLM_NAMES)
@dataclass(frozen=True, kw_only=True)
class RolloutConfig(EngineConfig):
    """Settings of a TRL trainer's rollouts; raises ConfigError for an unknown or invalid knob."""

    balance_ranks: bool = field(
        default=False,
        metadata={
            "help": "Distribute rows over ranks by the lengths of earlier completions of the same "
            "prompts, so that all ranks finish together. Every rank then receives all completions."
        },
    )
    trace: str = field(
        default="off",
        metadata={
            "help": "Which rollouts write a timeline, pictures and a Perfetto trace to "
            "`output_dir`. 'off': none; 'last': the last one; 'every:N': the first and every N-th "
            "after it. If a step has several rollouts, as in a tool loop, only its first one "
            "counts. Other rollouts cost nothing extra."
        },
    )

    @property
    def trace_period(self) -> int:
        """N of 'every:N'; 0 for 'off' and 'last'."""
        _, _, period = self.trace.partition(":")
        return int(period or 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(ConfigError, "balance_ranks", self.balance_ranks, True, False)
        if not (isinstance(self.trace, str) and _TRACE.fullmatch(self.trace)):
            raise ConfigError(
                f"trace={self.trace!r}: must be 'off', 'last' or 'every:N' with N >= 1; in YAML "
                "write 'off' with quotes"
            )
