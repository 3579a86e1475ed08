"""The critic: a value for each state of a completion, by an optimizer and a schedule of its own.

The policy's loss, optimizer, checkpoints and wrappers stay what they are without one.
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

# Weights around 0.02 lie 1.2e-4 apart in bfloat16. Of 100 steps of AdamW at 1e-6 they keep a
# hundredth of the way, at 1e-5 a tenth, at 1e-4 three quarters.
_LEAST_BF16_RATE = 1e-4

# Those of transformers that need no further argument, and come to an end.
ValueSchedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """How the critic learns; `RolloutPPOConfig` says what each is for."""

    learning_rate: float
    lr_scheduler_type: ValueSchedule = "constant"
    epochs: int = 1
    mini_batches: int = 1
    micro_batch_rows: int = 8
    clip: float | None = None
    max_grad_norm: float = 1.0


class ValueBatch(NamedTuple):
    """What the critic learns from: one rollout, T tokens a completion at the most.

    Attributes:
        input_ids: (B, S), prompts and completions.
        attention_mask: (B, S), 0 for padding.
        mask: (B, T), 1 where a token is trainable.
        values: (B, T), what the critic said before, of the state before each token.
        returns: (B, T), what it should have said.
    """

    input_ids: Tensor
    attention_mask: Tensor
    mask: Tensor
    values: Tensor
    returns: Tensor

    def rows(self, index: Tensor) -> "ValueBatch":
        """Some of the rows."""
        return ValueBatch(*(tensor[index] for tensor in self))


class Critic:
    """A value model with its optimizer, on one rank or on several.

    Args:
        model: A module called as `value_model.ValueModel` is. What needs no gradient in it is
            neither trained nor saved.
        settings: How it learns.
        accelerator: Accelerate's; places the model, and adds up over ranks.
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
        """Restart the learning-rate schedule, as a training begins. Before, the rate is constant.

        Args:
            num_rollouts: Calls of `learn` to come; a falling rate is zero after them.
        """
        self.scheduler = get_scheduler(
            self.settings.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=0,
            num_training_steps=num_rollouts,
        )

    @torch.no_grad()
    def values(self, input_ids: Tensor, attention_mask: Tensor, num_tokens: int) -> Tensor:
        """Values of the states before and after each token of the completions.

        Args:
            input_ids: (B, S), prompts and completions.
            attention_mask: (B, S), 0 for padding.
            num_tokens: T, the width of the completions.

        Returns:
            (B, T + 1), float32: column t is the state before token t, which has not read it.
        """
        self.model.eval()
        pieces = zip(self._in_pieces(input_ids), self._in_pieces(attention_mask), strict=True)
        return torch.cat([self.model(ids, mask, num_tokens + 1) for ids, mask in pieces])

    def _in_pieces(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(self.settings.micro_batch_rows)

    def learn(self, batch: ValueBatch) -> dict[str, float]:
        """Make the updates of one rollout, all at one learning rate.

        Args:
            batch: This rank's rows; every rank has as many.

        Returns:
            Means over the updates, of all ranks, by the names of the trainer's metrics.
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
        """Rows in a new order each epoch, by the random numbers that a resumed run has again."""
        device = batch.input_ids.device
        for _ in range(self.settings.epochs):
            order = torch.randperm(len(batch.input_ids)).to(device)
            yield from order.chunk(self.settings.mini_batches)

    def _update(self, batch: ValueBatch) -> dict[str, float]:
        """One step on the mean over the trainable tokens of all ranks, in micro-batches."""
        num_trainable = self._sum_ranks(batch.mask.sum())
        num_tokens = num_trainable.clamp(min=1)
        sums = batch.returns.new_zeros(2)
        for index in self._in_pieces(torch.arange(len(batch.mask), device=batch.mask.device)):
            piece = batch.rows(index)
            losses, clipped = self._losses(piece)
            # Gradients of ranks are averaged, so each one's sum counts as many times.
            (losses.sum() * self.accelerator.num_processes / num_tokens).backward()
            sums += torch.stack([losses.detach().sum(), clipped.sum()])
        norm = nn.utils.clip_grad_norm_(self._trained, self.settings.max_grad_norm)
        if num_trainable.item():  # or the momentum of earlier ones would move the weights
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss, clip_ratio = (self._sum_ranks(sums) / num_tokens).tolist()
        metrics = {"value/loss": loss, "value/grad_norm": norm.item()}
        if self.settings.clip is not None:
            metrics["value/clip_ratio"] = clip_ratio
        return metrics

    def _losses(self, piece: ValueBatch) -> tuple[Tensor, Tensor]:
        """Losses of the trainable tokens, and where clipping decided them; elsewhere 0."""
        width = piece.mask.shape[1] + 1
        values = self.model(piece.input_ids, piece.attention_mask, width)[:, :-1]
        losses, clipped = value_losses(values, piece.values, piece.returns, self.settings.clip)
        kept = piece.mask.bool()
        return torch.where(kept, losses, 0.0), clipped & kept

    def _sum_ranks(self, local: Tensor) -> Tensor:
        summed: Tensor = self.accelerator.reduce(local, "sum")
        return summed

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to go on to the last bit, but for what is frozen."""
        return {
            "model": self._own_state(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def _own_state(self) -> dict[str, Tensor]:
        model = self.accelerator.unwrap_model(self.model)
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        return {name: each for name, each in model.state_dict().items() if name not in frozen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave.

        Raises:
            UnsupportedTrainer: It was another kind of critic that gave it.
        """
        if other := self._own_state().keys() ^ state["model"].keys():
            raise UnsupportedTrainer(
                f"the critic of this checkpoint is another one: {len(other)} weights are in one of "
                f"the two alone, such as {min(other)}; resume with the `critic` or `value_model` "
                "that it was saved with"
            )
        model = self.accelerator.unwrap_model(self.model)
        model.load_state_dict({**model.state_dict(), **state["model"]})
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


def value_losses(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Half the squared error, and with `clip` the larger one of it and of the clipped value's.

    `max((V - R)**2, (V_old + clamp(V - V_old, -clip, clip) - R)**2) / 2`, as in OpenAI's baselines.

    Args:
        values: What the critic says now, of any shape.
        old_values: What it said at the rollout.
        returns: What it should say.
        clip: How far a value may move, in units of the reward; `None` for any distance.

    Returns:
        Losses, and where the clipped value's was the larger, in that shape.
    """
    losses = (values - returns).square()
    if clip is None:
        return losses / 2, torch.zeros_like(losses, dtype=torch.bool)
    moved = values - old_values
    bounded_losses = (old_values + moved.clamp(-clip, clip) - returns).square()
    # The sum above rounds where nothing is clipped, too.
    clipped = (moved.abs() > clip) & (bounded_losses > losses)
    return torch.where(clipped, bounded_losses, losses) / 2, clipped


def _warn_of_rounding(trained: list[nn.Parameter], rate: float) -> None:
    num_coarse = sum(p.numel() for p in trained if p.dtype == torch.bfloat16)
    if num_coarse and rate < _LEAST_BF16_RATE:
        logger.warning(
            "the critic trains %s weights in bfloat16 at value_learning_rate=%g, and most such "
            "steps are lost in rounding: load the policy in float32 with bf16=True, use "
            "critic='adapter' or 'head', or a rate of %g and more",
            f"{num_coarse:,}",
            rate,
            _LEAST_BF16_RATE,
        )
