"""RolloutConfig: every knob, frozen, checked once, with units."""

import re
from dataclasses import dataclass, fields
from typing import Any, Self

from rollout.errors import ConfigError, check_count, is_real, reject_unknown

_TRACE = re.compile("off|last|every:[1-9][0-9]*")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How the engine batches, and how much memory it may take.

    Raises:
        ConfigError: A name is unknown or a value cannot work.

    Example:
        >>> RolloutConfig(max_rows=8).num_slots
        2
    """

    max_rows: int = 256
    """Rows generated at the same time (lanes); further requests wait for one to finish."""

    max_row_tokens: int | None = None
    """Longest prompt plus completion, in tokens. `None`: the model's `max_position_embeddings`."""

    page_tokens: int = 256
    """Tokens in one KV page. The decode kernel reads fastest at 256."""

    kv_bytes: int | None = None
    """Most memory for KV pages, in bytes; never more than the requests at hand can need. `None`:
    on a GPU `kv_fraction` of what is free, on a CPU no limit."""

    kv_fraction: float | None = None
    """Share of the free GPU memory beside `train_reserve_bytes` that KV pages may take. `None`:
    0.9, so that the rest is for what a rollout computes; and 0.6 where training has to live with
    the rest, under `kv_keep="always"` without a `train_reserve_bytes`."""

    train_reserve_bytes: int | None = None
    """Free GPU memory that KV pages leave alone, for training, in bytes. `None`: none."""

    kv_keep: str = "rollout"
    """How long KV pages and cast weights are held under a TRL trainer. `rollout`: until TRL has
    its completions; training then has their memory. `always`: as long as the engine lives."""

    offload_bytes: int | None = None
    """Most pinned host memory for the KV of rows that were preempted because pages ran out, in
    bytes; taken when it is needed. What does not fit is computed again; 0: everything. `None`: on a
    GPU a sixteenth of the host's memory, on a CPU 0."""

    prefill_tokens: int = 8192
    """Most prompt tokens run in one engine step; longer prompts are prefilled in pieces."""

    num_slots: int = 2
    """IO slots: 2 overlaps host and device, 1 is the synchronous mode."""

    on_policy: str = "close"
    """`close`: log-probabilities differ from the trainer's by rounding alone. `exact`: on a GPU
    logits do not differ at all; the trainer then attends by the same kernel. See the README."""

    compile_layers: bool | None = None
    """Compile decoder layers, which takes seconds, once. `None`: on a GPU."""

    enforce_eager: bool = False
    """Run decode steps without CUDA graphs, kernel by kernel: slower, for debugging. On a CPU there
    are none."""

    fuse_projections: bool = False
    """Move the weights of q/k/v and of gate/up into one buffer each, when the engine is made, and
    compute each group by one product. Parameters, values and checkpoints stay what they are."""

    entropies: bool = False
    """Also return the entropy of each token's distribution over the full vocabulary."""

    kept_mass: bool = False
    """Also return the probability of the tokens that `top_k`, `top_p`, `min_p` and the suppressed
    ones leave. Without penalties, a log-probability less its logarithm is that of the draw."""

    balance_ranks: bool = False
    """Under a TRL trainer on several ranks: share rows out by the length that earlier completions
    of their prompts had, so that ranks finish together. All ranks then hear of all completions."""

    progress_bar: bool = False
    """Show a `tqdm` bar of finished rows while generating. Under a TRL trainer there is one that
    says more, on a terminal and unless `disable_tqdm`; this one then takes its place."""

    trace: str = "off"
    """Which rollouts of a training under TRL leave a timeline, pictures and a trace for Perfetto in
    its `output_dir`. `off`: none; `last`: the last one; `every:N`: the first and every N-th after
    it. Of several in one step, such as turns of a tool loop, the first counts. The others pay
    nothing."""

    @property
    def exact(self) -> bool:
        """Whether rollouts equal the trainer's forward to the last bit."""
        return self.on_policy == "exact"

    @property
    def trace_period(self) -> int:
        """Every how many rollouts one leaves its timeline; 0: none does, or the last alone."""
        _, _, period = self.trace.partition(":")
        return int(period or 0)

    @property
    def kv_share(self) -> float:
        """`kv_fraction`, or what stands for it."""
        if self.kv_fraction is not None:
            return self.kv_fraction
        beside = self.kv_keep == "always" and self.train_reserve_bytes is None
        return 0.6 if beside else 0.9

    @property
    def num_scores(self) -> int:
        """Numbers that come with each token: its log-probability, perhaps entropy, kept mass."""
        return 1 + self.entropies + self.kept_mass

    def __new__(cls, **knobs: Any) -> Self:
        """Refuse unknown names with an error that knows the right ones."""
        reject_unknown(ConfigError, cls.__name__, knobs, [field.name for field in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("max_rows", "page_tokens", "prefill_tokens"):
            check_count(ConfigError, name, getattr(self, name))
        for name in ("max_row_tokens", "kv_bytes", "train_reserve_bytes"):
            if getattr(self, name) is not None:
                check_count(ConfigError, name, getattr(self, name))
        if self.offload_bytes is not None:
            check_count(ConfigError, "offload_bytes", self.offload_bytes, least=0)
        check_count(ConfigError, "num_slots", self.num_slots)
        if self.num_slots > 2:
            raise ConfigError(f"num_slots={self.num_slots}: 2 overlaps host and device, 1 does not")
        if not is_real(self.kv_share) or not 0 < self.kv_share <= 1:
            raise ConfigError(f"kv_fraction={self.kv_fraction!r}: it must be above 0 and at most 1")
        if self.kv_keep not in ("rollout", "always"):
            raise ConfigError(f"kv_keep={self.kv_keep!r}: it must be 'rollout' or 'always'")
        switches = ("enforce_eager", "fuse_projections", "entropies", "kept_mass", "balance_ranks")
        for name in (*switches, "progress_bar"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r}: it must be True or False")
        if self.on_policy not in ("close", "exact"):
            raise ConfigError(f"on_policy={self.on_policy!r}: it must be 'close' or 'exact'")
        if not (isinstance(self.trace, str) and _TRACE.fullmatch(self.trace)):
            raise ConfigError(
                f"trace={self.trace!r}: it must be 'off', 'last' or 'every:N', N > 0; in YAML "
                "'off' needs its quotes"
            )
        if not isinstance(self.compile_layers, bool | None):
            raise ConfigError(
                f"compile_layers={self.compile_layers!r}: it must be True, False or None"
            )
