"""The memory plan: what KV pages may take, and what the engine takes in and between rollouts."""

from dataclasses import dataclass

from rich.table import Table

from rollout.config import EngineConfig

_GIB = 2**30


def kv_limit(config: EngineConfig, free_bytes: int | None) -> int | None:
    """Bytes that KV pages may take at most; `None` for no limit.

    They are `kv_bytes`, or `kv_fraction` of what is free beside `train_reserve_bytes`.

    Args:
        config: The engine's knobs.
        free_bytes: Free on the device, those of the present pages included. `None`: unknown, as on
            a CPU.

    Example:
        >>> kv_limit(EngineConfig(kv_fraction=0.5, train_reserve_bytes=20), 100)
        40
    """
    if config.kv_bytes is not None or free_bytes is None:
        return config.kv_bytes
    return int(max(0, free_bytes - (config.train_reserve_bytes or 0)) * config.kv_share)


@dataclass(frozen=True)
class PlanLine:
    """One line of the memory plan: a part's name, its bytes, and what decides them."""

    name: str
    num_bytes: int
    remark: str

    @property
    def gib(self) -> str:
        """The size in GiB."""
        return f"{self.num_bytes / _GIB:.3f}"


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What the engine takes of a device's memory, in bytes.

    Attributes:
        device: Name of the device.
        weights: The trainer's weights, which the engine reads in place.
        cast_weights: A second copy of weights, in the dtype that the trainer computes in.
        graphs: Memory pool of the captured CUDA graphs.
        buffers: State of lanes, and buffers for copies between host and device.
        workspaces: Activations of a prefill, at most.
        kv_pages: KV pages mapped for the present rows.
        num_pages: Number of these pages.
        kv_limit: Bytes that KV pages may take at most. `None`: no limit.
        page: One KV page.
        free: Free on the device, the present KV pages included. `None`: unknown.
        config: The engine's knobs.
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
    def lines(self) -> list[PlanLine]:
        """The parts that take memory, and their sums."""
        reserve, kv_keep = self.config.train_reserve_bytes or 0, f"kv_keep={self.config.kv_keep!r}"
        lines = [
            PlanLine("weights", self.weights, "the trainer's own"),
            PlanLine("cast weights", self.cast_weights, "of linear layers, in autocast's dtype"),
            PlanLine("graphs", self.graphs, "their memory pool"),
            PlanLine("buffers", self.buffers, "lanes and slots"),
            PlanLine("workspaces", self.workspaces, f"prefill_tokens={self.config.prefill_tokens}"),
            PlanLine("KV pages", self.kv_pages, self._kv_remark),
            PlanLine("training reserve", reserve, "train_reserve_bytes"),
            PlanLine("the engine in a rollout", self.in_rollout, "beside the weights"),
            PlanLine("the engine between rollouts", self.between_rollouts, kv_keep),
        ]
        return [line for line in lines if line.num_bytes]

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
        parts = (f"{line.name} {line.gib} GiB ({line.remark})" for line in self.lines)
        return f"memory plan for {self.device}: {', '.join(parts)}"

    def table(self) -> Table:
        """The same lines as a table."""
        table = Table(title=f"twinslot: memory on {self.device}")
        table.add_column("")
        table.add_column("GiB", justify="right")
        table.add_column("")
        for line in self.lines:
            table.add_row(line.name, line.gib, line.remark)
        return table
