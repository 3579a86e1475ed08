"""The critic: a value model with its own optimizer and learning-rate schedule.

It changes nothing in the policy's loss, optimizer, checkpoints or wrappers.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import get_scheduler

from rollout.errors import UnsupportedTrainer

logger = logging.getLogger(__name__)

# Near 0.02, bfloat16 numbers are 1.2e-4 apart, so rounding swallows small updates. After 100 steps
# of AdamW, weights have moved 1 % of the float32 distance at a rate of 1e-6, 10 % at 1e-5, 75 % at
# 1e-4.
_LEAST_BF16_RATE = 1e-4

# The schedules of transformers that need no further argument and do not repeat.
ValueSchedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """How the critic learns. `RolloutPPOConfig` documents each field as `value_*`."""

    learning_rate: float
    lr_scheduler_type: ValueSchedule = "constant"
    epochs: int = 1
    mini_batches: int = 1
    micro_batch_rows: int = 8
    clip: float | None = None
    max_grad_norm: float = 1.0


class ValueBatch(NamedTuple):
    """One rollout for the critic to learn from: B rows, S tokens each, T of the completion.

    Attributes:
        input_ids: (B, S), prompts and completions.
        attention_mask: (B, S), 0 for padding.
        mask: (B, T), 1 at trainable tokens.
        values: (B, T), the critic's value at the rollout of the state before each token.
        returns: (B, T), the targets.
    """

    input_ids: Tensor
    attention_mask: Tensor
    mask: Tensor
    values: Tensor
    returns: Tensor

    def rows(self, index: Tensor) -> "ValueBatch":
        """Select rows."""
        return ValueBatch(*(tensor[index] for tensor in self))


class Critic:
    """A value model with its optimizer, on one or more ranks.

    Args:
        model: Called like `value_model.ValueModel`. Parameters without `requires_grad` are neither
            trained nor saved.
        settings: How it learns.
        accelerator: The trainer's `accelerate.Accelerator`.
    """

    def __init__(self, model: nn.Module, settings: CriticSettings, accelerator: Any) -> None:
        self.settings = settings
        self.accelerator = accelerator
        self.model = accelerator.prepare_model(model)
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        _warn_of_rounding(self._trained, settings.learning_rate)
        self.optimizer = torch.optim.AdamW(
            self._trained, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.scheduler = get_scheduler("constant", self.optimizer)

    def schedule(self, num_rollouts: int) -> None:
        """Start the learning-rate schedule, which ends after `num_rollouts` calls of `learn`."""
        self.scheduler = get_scheduler(
            self.settings.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=0,
            num_training_steps=num_rollouts,
        )

    @torch.no_grad()
    def values(self, input_ids: Tensor, attention_mask: Tensor, num_tokens: int) -> Tensor:
        """Values of the states before and after each completion token.

        Args:
            input_ids: (B, S), prompts and completions.
            attention_mask: (B, S), 0 for padding.
            num_tokens: T, the width of the completions.

        Returns:
            (B, T + 1), float32. Column t is the state before token t, column T after the last.
        """
        self.model.eval()
        pieces = zip(self._in_pieces(input_ids), self._in_pieces(attention_mask), strict=True)
        return torch.cat([self.model(ids, mask, num_tokens + 1) for ids, mask in pieces])

    def _in_pieces(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(self.settings.micro_batch_rows)

    def learn(self, batch: ValueBatch) -> dict[str, float]:
        """Make all updates for one rollout, then advance the learning-rate schedule once.

        `batch` has this rank's rows; every rank passes the same number. Returns the trainer's
        metrics by name, as means over the updates and all ranks.
        """
        self.model.train()
        metrics = defaultdict(list)
        for index in self._mini_batches(batch):
            for name, value in self._update(batch.rows(index)).items():
                metrics[name].append(value)
        means = {name: sum(values) / len(values) for name, values in metrics.items()}
        means["value/lr"] = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step()
        return means

    def _mini_batches(self, batch: ValueBatch) -> Iterator[Tensor]:
        """Row indices, shuffled anew each epoch."""
        device = batch.input_ids.device
        for _ in range(self.settings.epochs):
            # The CPU's global generator: the trainer's checkpoints restore its state.
            order = torch.randperm(len(batch.input_ids)).to(device)
            yield from order.chunk(self.settings.mini_batches)

    def _update(self, batch: ValueBatch) -> dict[str, float]:
        """One optimizer step on the mean loss over the trainable tokens of all ranks."""
        num_trainable = self._sum_ranks(batch.mask.sum())
        num_tokens = num_trainable.clamp(min=1)
        sums = batch.returns.new_zeros(2)
        for index in self._in_pieces(torch.arange(len(batch.mask), device=batch.mask.device)):
            piece = batch.rows(index)
            losses, clipped = self._losses(piece)
            # DDP averages gradients over ranks; the factor makes that a sum.
            (losses.sum() * self.accelerator.num_processes / num_tokens).backward()
            sums += torch.stack([losses.detach().sum(), clipped.sum()])
        norm = nn.utils.clip_grad_norm_(self._trained, self.settings.max_grad_norm)
        if num_trainable.item():  # without trainable tokens, momentum would still move weights
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss, clip_ratio = (self._sum_ranks(sums) / num_tokens).tolist()
        metrics = {"value/loss": loss, "value/grad_norm": norm.item()}
        if self.settings.clip is not None:
            metrics["value/clip_ratio"] = clip_ratio
        return metrics

    def _losses(self, piece: ValueBatch) -> tuple[Tensor, Tensor]:
        """(B, T) losses, and where the clipped loss was used. Both are 0 where masked."""
        width = piece.mask.shape[1] + 1
        values = self.model(piece.input_ids, piece.attention_mask, width)[:, :-1]
        losses, clipped = value_losses(values, piece.values, piece.returns, self.settings.clip)
        kept = piece.mask.bool()
        return torch.where(kept, losses, 0.0), clipped & kept

    def _sum_ranks(self, local: Tensor) -> Tensor:
        summed: Tensor = self.accelerator.reduce(local, "sum")
        return summed

    def state_dict(self) -> dict[str, Any]:
        """The state of a resumed run that is bit-identical, without frozen weights."""
        return {
            "model": self._trained_state(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def _trained_state(self) -> dict[str, Tensor]:
        model = self.accelerator.unwrap_model(self.model)
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        return {name: each for name, each in model.state_dict().items() if name not in frozen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`.

        Raises:
            UnsupportedTrainer: The state is of another kind of critic.
        """
        if other := self._trained_state().keys() ^ state["model"].keys():
            raise UnsupportedTrainer(
                f"the checkpoint has another kind of critic: {len(other)} weights are only in the "
                f"checkpoint or only in this critic, such as {min(other)}; resume with the "
                "`critic` or `value_model` of the saved run"
            )
        model = self.accelerator.unwrap_model(self.model)
        model.load_state_dict({**model.state_dict(), **state["model"]})
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


def value_losses(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Half the squared error, clipped as in OpenAI's baselines if `clip` is set.

    `max((V - R)**2, (V_old + clamp(V - V_old, -clip, clip) - R)**2) / 2`. `V_old` is the value at
    the rollout. Returns the losses, and where the second term is larger, in the shape of `values`.
    """
    losses = (values - returns).square()
    if clip is None:
        return losses / 2, torch.zeros_like(losses, dtype=torch.bool)
    moved = values - old_values
    bounded_losses = (old_values + moved.clamp(-clip, clip) - returns).square()
    # The sum above rounds even without clipping, so comparing the losses alone is not enough.
    clipped = (moved.abs() > clip) & (bounded_losses > losses)
    return torch.where(clipped, bounded_losses, losses) / 2, clipped


def _warn_of_rounding(trained: list[nn.Parameter], rate: float) -> None:
    num_coarse = sum(p.numel() for p in trained if p.dtype == torch.bfloat16)
    if num_coarse and rate < _LEAST_BF16_RATE:
        logger.warning(
            "the critic trains %s weights in bfloat16 at value_learning_rate=%g, so rounding "
            "discards most of its updates; load the policy in float32 and set bf16=True, or set "
            "critic='adapter' or 'head', or value_learning_rate to at least %g",
            f"{num_coarse:,}",
            rate,
            _LEAST_BF16_RATE,
        )
