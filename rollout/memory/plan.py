"""The memory plan: the limit of KV pages, and the engine's memory in and between rollouts."""

from dataclasses import dataclass

from rich.table import Table

from rollout.config import EngineConfig

_GIB = 2**30


def kv_limit(config: EngineConfig, free_bytes: int | None) -> int | None:
    """Most bytes for KV pages: `kv_bytes`, or a share of the free memory; `None`: no limit.

    The share is `kv_fraction` of `free_bytes - train_reserve_bytes`. `free_bytes` includes the
    present pages; `None`: unknown, as on a CPU.

    Example:
        >>> kv_limit(EngineConfig(kv_fraction=0.5, train_reserve_bytes=20), 100)
        40
    """
    if config.kv_bytes is not None or free_bytes is None:
        return config.kv_bytes
    return int(max(0, free_bytes - (config.train_reserve_bytes or 0)) * config.kv_share)


@dataclass(frozen=True)
class PlanLine:
    """One line of the memory plan. `remark` says what decides the size."""

    name: str
    num_bytes: int
    remark: str

    @property
    def gib(self) -> str:
        """The size in GiB."""
        return f"{self.num_bytes / _GIB:.3f}"


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The engine's memory on a device, in bytes.

    Attributes:
        weights: The trainer's weights, which the engine reads in place.
        cast_weights: Second copy of weights, in the dtype that the trainer computes in.
        buffers: State of lanes, and buffers for copies between host and device.
        workspaces: Upper bound of a prefill's activations.
        states: Recurrent states of `num_lanes` lanes and the trash lane.
        kv_pages: KV pages mapped now.
        kv_limit: Most bytes for KV pages; `None`: no limit.
        page: One KV page.
        free: Free memory, the present KV pages included; `None`: unknown.
    """

    device: str
    weights: int
    cast_weights: int
    graphs: int
    buffers: int
    workspaces: int
    states: int
    num_lanes: int
    kv_pages: int
    num_pages: int
    kv_limit: int | None
    page: int
    free: int | None
    config: EngineConfig

    @property
    def in_rollout(self) -> int:
        """Bytes that a rollout takes, without the trainer's weights."""
        kept = self.graphs + self.buffers
        return self.cast_weights + kept + self.workspaces + self.states + self.kv_pages

    @property
    def between_rollouts(self) -> int:
        """Bytes that training cannot use."""
        kept = self.kv_pages + self.states + self.cast_weights
        return self.graphs + self.buffers + (kept if self.config.kv_keep == "always" else 0)

    @property
    def lines(self) -> list[PlanLine]:
        """The parts, then their sums. Lines of 0 bytes are left out."""
        reserve, kv_keep = self.config.train_reserve_bytes or 0, f"kv_keep={self.config.kv_keep!r}"
        lines = [
            PlanLine("weights", self.weights, "the trainer's own"),
            PlanLine("cast weights", self.cast_weights, "copy in the autocast dtype"),
            PlanLine("graphs", self.graphs, "CUDA graphs' pool"),
            PlanLine("buffers", self.buffers, "lanes and slots"),
            PlanLine("workspaces", self.workspaces, f"prefill_tokens={self.config.prefill_tokens}"),
            PlanLine("states", self.states, self._states_remark),
            PlanLine("KV pages", self.kv_pages, self._kv_remark),
            PlanLine("training reserve", reserve, "train_reserve_bytes"),
            PlanLine("sum in a rollout", self.in_rollout, "without the weights"),
            PlanLine("sum between rollouts", self.between_rollouts, kv_keep),
        ]
        return [line for line in lines if line.num_bytes]

    @property
    def _states_remark(self) -> str:
        size = self.states / (self.num_lanes + 1) / 2**20
        return f"{size:.3g} MiB for each of {self.num_lanes} rows, and for padding"

    @property
    def _kv_remark(self) -> str:
        pages = f"{self.num_pages} pages of {self.page / 2**20:.3g} MiB"
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
        """The lines as a table."""
        table = Table(title=f"twinslot: memory on {self.device}")
        table.add_column("")
        table.add_column("GiB", justify="right")
        table.add_column("")
        for line in self.lines:
            table.add_row(line.name, line.gib, line.remark)
        return table
