"""EngineConfig: every knob of the engine, frozen, checked once, with units."""

from dataclasses import dataclass, field

from rollout.errors import ConfigError, check_choice, check_count, is_real, refuse_unknown


@refuse_unknown(ConfigError)
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine batches, and how much memory it may take.

    Each field's `help` says what the knob does; a command line shows the same text.

    Raises:
        ConfigError: A name is unknown or a value cannot work.

    Example:
        >>> EngineConfig(max_rows=8).num_slots
        2
    """

    max_rows: int = field(
        default=256,
        metadata={"help": "Most rows generated at the same time; more requests wait for a lane."},
    )
    max_row_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Longest prompt plus completion, in tokens. None: the model's "
            "`max_position_embeddings`."
        },
    )
    page_tokens: int = field(
        default=256,
        metadata={"help": "Tokens in one KV page. The decode kernel reads fastest at 256."},
    )
    kv_bytes: int | None = field(
        default=None,
        metadata={
            "help": "Most memory for KV pages, in bytes; never more than the requests at hand can "
            "need. None: on a GPU `kv_fraction` of the free memory, on a CPU no limit."
        },
    )
    kv_fraction: float | None = field(
        default=None,
        metadata={
            "help": "Share of the free GPU memory beside `train_reserve_bytes` that KV pages may "
            "take. None: 0.9, which leaves a tenth for the rollout's own buffers; 0.6 when pages "
            "stay allocated during training (`kv_keep='always'` without `train_reserve_bytes`)."
        },
    )
    train_reserve_bytes: int | None = field(
        default=None,
        metadata={
            "help": "Free GPU memory that KV pages leave for training, in bytes. None: none."
        },
    )
    kv_keep: str = field(
        default="rollout",
        metadata={
            "help": "How long KV pages and cast weights stay allocated under a TRL trainer. "
            "'rollout': until TRL has its completions; training then has the memory. 'always': as "
            "long as the engine lives."
        },
    )
    offload_bytes: int | None = field(
        default=None,
        metadata={
            "help": "Most pinned host memory for the KV of rows preempted for want of pages, in "
            "bytes; allocated on demand. KV that does not fit is computed again. None: on a GPU a "
            "sixteenth of the host's memory, on a CPU 0."
        },
    )
    prefill_tokens: int = field(
        default=8192,
        metadata={
            "help": "Most prompt tokens in one engine step; longer prompts are prefilled in pieces."
        },
    )
    num_slots: int = field(
        default=2,
        metadata={"help": "IO slots: 2 overlaps host and device, 1 is the synchronous mode."},
    )
    on_policy: str = field(
        default="close",
        metadata={
            "help": "'close': log-probabilities differ from the trainer's by rounding alone. "
            "'exact': on a GPU the logits are equal to the last bit; the trainer then attends with "
            "the engine's kernel. See the README."
        },
    )
    compile_layers: bool | None = field(
        default=None,
        metadata={"help": "Compile decoder layers, once, which takes seconds. None: on a GPU."},
    )
    enforce_eager: bool = field(
        default=False,
        metadata={
            "help": "Run decode steps without CUDA graphs, kernel by kernel: slower, for debugging."
        },
    )
    fuse_projections: bool = field(
        default=False,
        metadata={
            "help": "When the engine is made, move the weights of q/k/v and of gate/up into one "
            "buffer each, and compute each group as one product. Parameters, values and "
            "checkpoints stay the same."
        },
    )
    entropies: bool = field(
        default=False,
        metadata={
            "help": "Also return the entropy of each token's distribution over the full vocabulary."
        },
    )
    kept_mass: bool = field(
        default=False,
        metadata={
            "help": "Also return the probability of the tokens that `top_k`, `top_p`, `min_p` and "
            "token suppression keep. Without penalties, a log-probability minus the logarithm of "
            "this number is that of the draw."
        },
    )

    @property
    def exact(self) -> bool:
        """Whether rollouts equal the trainer's forward to the last bit."""
        return self.on_policy == "exact"

    @property
    def kv_share(self) -> float:
        """`kv_fraction`, or its default."""
        if self.kv_fraction is not None:
            return self.kv_fraction
        beside_training = self.kv_keep == "always" and self.train_reserve_bytes is None
        return 0.6 if beside_training else 0.9

    @property
    def num_scores(self) -> int:
        """Numbers returned with each token: its log-probability, perhaps entropy, kept mass."""
        return 1 + self.entropies + self.kept_mass

    def __post_init__(self) -> None:
        self._check_counts()
        if not is_real(self.kv_share) or not 0 < self.kv_share <= 1:
            raise ConfigError(f"kv_fraction={self.kv_fraction!r}: it must be above 0 and at most 1")
        check_choice(ConfigError, "kv_keep", self.kv_keep, "rollout", "always")
        check_choice(ConfigError, "on_policy", self.on_policy, "close", "exact")
        check_choice(ConfigError, "compile_layers", self.compile_layers, True, False, None)
        for name in ("enforce_eager", "fuse_projections", "entropies", "kept_mass"):
            check_choice(ConfigError, name, getattr(self, name), True, False)

    def _check_counts(self) -> None:
        for name in ("max_rows", "page_tokens", "prefill_tokens", "num_slots"):
            check_count(ConfigError, name, getattr(self, name))
        for name in ("max_row_tokens", "kv_bytes", "train_reserve_bytes"):
            if getattr(self, name) is not None:
                check_count(ConfigError, name, getattr(self, name))
        if self.offload_bytes is not None:
            check_count(ConfigError, "offload_bytes", self.offload_bytes, least=0)
        if self.num_slots > 2:
            raise ConfigError(f"num_slots={self.num_slots}: 2 overlaps host and device, 1 does not")
