"""EngineConfig: every knob of the engine."""

from dataclasses import dataclass, field

from rollout.errors import ConfigError, check_choice, check_count, is_real, refuse_unknown

_WHOLE_MODEL = "each process runs the whole model on its own GPU; drop it"
VLLM_NAMES = {
    "max_num_seqs": "set max_rows",
    "max_model_len": "set max_row_tokens",
    "max_model_length": "set max_row_tokens",
    "max_seq_len": "set max_row_tokens",
    "max_num_batched_tokens": "set prefill_tokens",
    "enable_chunked_prefill": "prompts are prefilled in chunks of prefill_tokens; drop it",
    "block_size": "set page_tokens",
    "gpu_memory_utilization": "set kv_fraction, a share of the memory that is free in a rollout",
    "kv_cache_memory_bytes": "set kv_bytes",
    "swap_space": "set offload_bytes, in bytes",
    "cpu_offload_gb": "set offload_bytes, in bytes; weights stay on the GPU",
    "kv_cache_dtype": "keys and values have the dtype in which the trainer computes; drop it",
    "dtype": "rollouts compute in the trainer's dtype; drop it",
    "quantization": "rollouts read the trainer's own weights; drop it",
    "enable_prefix_caching": "beginnings of the same prompt are always shared; drop it",
    "enable_sleep_mode": "set kv_keep: 'rollout' gives memory back after each rollout",
    "async_scheduling": "set num_slots: 2 overlaps host and device work",
    "compilation_config": "set compile_layers",
    "enable_lora": "rollouts run the trainer's own adapters; drop it",
    "tensor_parallel_size": _WHOLE_MODEL,
    "pipeline_parallel_size": _WHOLE_MODEL,
    "data_parallel_size": "start one process for each GPU (accelerate launch); drop it",
    "seed": "set the trainer's seed, or pass seeds to generate()",
}
"""vLLM's names for what the engine does, and what to write here."""


@refuse_unknown(ConfigError, VLLM_NAMES)
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine batches and how much memory it may use. Each field's `help` describes it.

    Raises:
        ConfigError: A name is unknown or a value is invalid.

    Example:
        >>> EngineConfig(max_rows=8).page_tokens
        256
    """

    max_rows: int = field(
        default=256,
        metadata={"help": "Most rows generated at the same time. Further rows wait for a lane."},
    )
    max_row_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Most tokens of one row, prompt plus completion. None: the model's "
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
            "help": "Most memory for KV pages, in bytes. The engine allocates no more than the "
            "submitted rows can need. None: on a GPU, `kv_fraction` decides; on a CPU, no limit."
        },
    )
    kv_fraction: float | None = field(
        default=None,
        metadata={
            "help": "Share of the free GPU memory, minus `train_reserve_bytes`, that KV pages may "
            "take. None: 0.9, which leaves 0.1 for the rollout's other buffers; 0.6 when pages "
            "stay allocated during training (`kv_keep='always'` without `train_reserve_bytes`)."
        },
    )
    train_reserve_bytes: int | None = field(
        default=None,
        metadata={"help": "GPU memory that KV pages leave free for training, in bytes. None: 0."},
    )
    kv_keep: str = field(
        default="rollout",
        metadata={
            "help": "How long KV pages and cast weights stay allocated under a TRL trainer. "
            "'rollout': until the rollout ends; training then uses the memory. 'always': until the "
            "engine is closed."
        },
    )
    offload_bytes: int | None = field(
        default=None,
        metadata={
            "help": "Most pinned host memory for the KV of preempted rows, in bytes, allocated on "
            "demand. KV that does not fit is recomputed. None: on a GPU, 1/16 of the host's "
            "memory; on a CPU, 0."
        },
    )
    prefill_tokens: int = field(
        default=8192,
        metadata={
            "help": "Most prompt tokens in one step. Longer prompts are prefilled in several steps."
        },
    )
    num_slots: int | None = field(
        default=None,
        metadata={
            "help": "IO slots: 2 overlaps host and device work, 1 runs them in turn. None: 2 on a "
            "GPU; 1 on a CPU, where nothing overlaps."
        },
    )
    on_policy: str = field(
        default="close",
        metadata={
            "help": "'close': log-probabilities differ from the trainer's by rounding only. "
            "'exact': on a GPU, logits equal the trainer's bit for bit; the trainer then uses "
            "the engine's attention kernel. See trainers/README.md."
        },
    )
    compile_layers: bool | None = field(
        default=None,
        metadata={"help": "Compile decoder layers. Takes seconds, once. None: only on a GPU."},
    )
    enforce_eager: bool = field(
        default=False,
        metadata={"help": "Decode without CUDA graphs: slower, for debugging."},
    )
    fuse_projections: bool | None = field(
        default=None,
        metadata={
            "help": "When the engine starts, move the weights of layers with one input (q/k/v, "
            "gate/up) into one buffer and compute them as one matrix product. Parameters, values "
            "and checkpoints stay the same. None: on a GPU, unless FSDP or DeepSpeed will shard or "
            "cast the weights; their gathered copies are fused in any case."
        },
    )
    self_check: bool = field(
        default=True,
        metadata={
            "help": "When the engine starts, and when it copies a changed module tree, compare its "
            "logits with those of the model's own forward on 4 rows, and refuse a model whose "
            "logits differ by more than rounding explains. Takes about a second."
        },
    )
    entropies: bool = field(
        default=False,
        metadata={"help": "Also return the entropy of each token's full distribution, in nats."},
    )
    kept_mass: bool = field(
        default=False,
        metadata={
            "help": "Also return the total probability of the tokens that `top_k`, `top_p`, "
            "`min_p` and token suppression keep. Without penalties, a token was drawn with the "
            "log-probability `logprob - log(kept_mass)`."
        },
    )

    @property
    def exact(self) -> bool:
        """Whether rollouts equal the trainer's forward bit for bit."""
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
        """Numbers returned per token: the log-probability, then entropy and kept mass if asked."""
        return 1 + self.entropies + self.kept_mass

    def __post_init__(self) -> None:
        for name in ("max_rows", "page_tokens", "prefill_tokens"):
            check_count(ConfigError, name, getattr(self, name))
        for name in ("max_row_tokens", "kv_bytes", "train_reserve_bytes"):
            if getattr(self, name) is not None:
                check_count(ConfigError, name, getattr(self, name))
        if self.offload_bytes is not None:
            check_count(ConfigError, "offload_bytes", self.offload_bytes, least=0)
        check_choice(ConfigError, "num_slots", self.num_slots, 1, 2, None)
        if not is_real(self.kv_share) or not 0 < self.kv_share <= 1:
            raise ConfigError(f"kv_fraction={self.kv_fraction!r}: must be above 0 and at most 1")
        check_choice(ConfigError, "kv_keep", self.kv_keep, "rollout", "always")
        check_choice(ConfigError, "on_policy", self.on_policy, "close", "exact")
        for name in ("compile_layers", "fuse_projections"):
            check_choice(ConfigError, name, getattr(self, name), True, False, None)
        for name in ("enforce_eager", "self_check", "entropies", "kept_mass"):
            check_choice(ConfigError, name, getattr(self, name), True, False)
