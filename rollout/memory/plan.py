"""The memory plan: what KV pages may take, and what the engine holds in and between rollouts."""

from dataclasses import dataclass

from rich.table import Table

from rollout.config import EngineConfig

_GIB = 2**30


def kv_limit(config: EngineConfig, free_bytes: int | None) -> int | None:
    """Most bytes that KV pages may take.

    Args:
        config: `kv_bytes`, or `kv_fraction` of what is free beside `train_reserve_bytes`.
        free_bytes: Free bytes of the device, those of the present pages included. `None`: not
            known, as on a CPU.

    Returns:
        Bytes, or `None` for no limit.

    Example:
        >>> kv_limit(EngineConfig(kv_fraction=0.5, train_reserve_bytes=20), 100)
        40
    """
    if config.kv_bytes is not None or free_bytes is None:
        return config.kv_bytes
    return int(max(0, free_bytes - (config.train_reserve_bytes or 0)) * config.kv_share)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What the engine takes of a device's memory, all in bytes.

    Attributes:
        device: Its name.
        weights: The trainer's, which the engine reads where they lie.
        cast_weights: Held a second time, in the dtype that the trainer computes in.
        graphs: Memory pool of the captured graphs.
        buffers: State of lanes, and what travels between host and device.
        workspaces: What a prefill computes in, at most.
        kv_pages: Mapped for the rows at hand.
        num_pages: How many they are.
        kv_limit: Most that there may be of them. `None`: no limit.
        page: One KV page.
        free: What is free on the device, those pages included. `None`: not known.
        config: Knobs that it follows.
    """

    device: str
    weights: int
    cast_weights: int
    graphs: int
    buffers: int
    workspaces: int
    kv_pages: int
    num_pages: int
    kv_limit: int | None
    page: int
    free: int | None
    config: EngineConfig

    @property
    def in_rollout(self) -> int:
        """What a rollout takes beside the trainer's weights."""
        kept = self.graphs + self.buffers
        return self.cast_weights + kept + self.workspaces + self.kv_pages

    @property
    def between_rollouts(self) -> int:
        """What training has to do without."""
        kept = self.kv_pages + self.cast_weights if self.config.kv_keep == "always" else 0
        return self.graphs + self.buffers + kept

    @property
    def lines(self) -> list[tuple[str, int, str]]:
        """Name, bytes and remark of each part."""
        keep = f"kv_keep={self.config.kv_keep!r}"
        return [
            ("weights", self.weights, "the trainer's own"),
            ("cast weights", self.cast_weights, "of linear layers, in the dtype of autocast"),
            ("graphs", self.graphs, "their memory pool"),
            ("buffers", self.buffers, "lanes and slots"),
            ("workspaces", self.workspaces, f"prefill_tokens={self.config.prefill_tokens}"),
            ("KV pages", self.kv_pages, self._kv_remark),
            ("training reserve", self.config.train_reserve_bytes or 0, "train_reserve_bytes"),
            ("the engine in a rollout", self.in_rollout, "beside the weights"),
            ("the engine between rollouts", self.between_rollouts, keep),
        ]

    @property
    def _kv_remark(self) -> str:
        pages = f"{self.num_pages} of {self.page / 2**20:.3g} MiB"
        if self.kv_limit is None:
            return f"{pages}; no limit"
        most = f"{pages}; at most {self.kv_limit / _GIB:.2f} GiB"
        if self.config.kv_bytes is not None or self.free is None:
            return f"{most} by kv_bytes"
        return f"{most}: kv_fraction={self.config.kv_share} of {self.free / _GIB:.2f} GiB free"

    def __str__(self) -> str:
        parts = (f"{name} {size / _GIB:.3f} GiB ({remark})" for name, size, remark in self.lines)
        return f"memory plan for {self.device}: {', '.join(parts)}"

    def table(self) -> Table:
        """The lines, to be printed."""
        table = Table(title=f"twinslot: memory on {self.device}")
        table.add_column("")
        table.add_column("GiB", justify="right")
        table.add_column("")
        for name, size, remark in self.lines:
            table.add_row(name, f"{size / _GIB:.3f}", remark)
        return table
