"""RolloutConfig: the engine's knobs, and those that only a trainer reads."""

import re
from dataclasses import dataclass, field

from rollout.config import EngineConfig
from rollout.errors import ConfigError, check_choice, refuse_unknown

_TRACE = re.compile("off|last|every:[1-9][0-9]*")


@refuse_unknown(ConfigError)
@dataclass(frozen=True, kw_only=True)
class RolloutConfig(EngineConfig):
    """How a TRL trainer's rollouts are made: the knobs of `EngineConfig`, and two of the trainer's.

    Raises:
        ConfigError: A name is unknown or a value cannot work.
    """

    balance_ranks: bool = field(
        default=False,
        metadata={
            "help": "On several ranks, share rows out by the length of earlier completions of the "
            "same prompts, so that all ranks finish together. Every rank then receives all "
            "completions."
        },
    )
    trace: str = field(
        default="off",
        metadata={
            "help": "Which rollouts of a training leave a timeline, pictures and a trace for "
            "Perfetto in `output_dir`. 'off': none; 'last': the last one; 'every:N': the first and "
            "every N-th after it. Of several rollouts in one step, such as the turns of a tool "
            "loop, the first counts. Rollouts without a trace cost nothing extra."
        },
    )

    @property
    def trace_period(self) -> int:
        """Rollouts from one trace to the next; 0 where none or only the last is traced."""
        _, _, period = self.trace.partition(":")
        return int(period or 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(ConfigError, "balance_ranks", self.balance_ranks, True, False)
        if not (isinstance(self.trace, str) and _TRACE.fullmatch(self.trace)):
            raise ConfigError(
                f"trace={self.trace!r}: it must be 'off', 'last' or 'every:N', N > 0; in YAML "
                "'off' needs its quotes"
            )
