"""The critic: a value for each state of a completion, from a model and an optimizer of its own.

It shares nothing with the policy once it is made, so the policy's loss, optimizer, checkpoints and
wrappers stay what they are without one.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn


class ValueModel(nn.Module):
    """A decoder and a linear head from its last hidden state to one number a position.

    The head is zero at first, so that the first advantages are those of no critic at all, and it is
    computed in float32.

    Args:
        backbone: Called as a transformers model; its output has `last_hidden_state`.
        hidden_size: Width of that.
    """

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone.requires_grad_(True)
        # Without its random start: the trainer's random numbers stay those of a run without critic.
        self.head = nn.utils.skip_init(nn.Linear, hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @classmethod
    def from_policy(cls, policy: Any) -> Self:
        """Start from a copy of the policy's own weights, without its adapters.

        Args:
            policy: A causal language model of transformers, or a PEFT model around one.
        """
        adapted = hasattr(policy, "unload")  # PEFT's, whose `base_model` holds the adapters
        backbone = copy.deepcopy(policy).unload().base_model if adapted else None
        backbone = backbone or copy.deepcopy(policy.base_model)
        device = next(backbone.parameters()).device
        return cls(backbone, policy.config.get_text_config().hidden_size).to(device)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, num_values: int) -> Tensor:
        """Values at the last positions.

        Args:
            input_ids: (B, S).
            attention_mask: (B, S), 0 for padding.
            num_values: How many positions, from the last one backwards.

        Returns:
            (B, num_values), float32. Each reads its own token and those before it.
        """
        output = self.backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        hidden = output.last_hidden_state[:, -num_values:].float()
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.head(hidden)[..., 0]
        return values


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """How the critic learns; `RolloutPPOConfig` says what each is for."""

    learning_rate: float
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
        model: A module called as `ValueModel` is.
        settings: How it learns.
        accelerator: Accelerate's; places the model, and adds up over ranks.
    """

    def __init__(self, model: nn.Module, settings: CriticSettings, accelerator: Any) -> None:
        self.settings = settings
        self.accelerator = accelerator
        self.model = accelerator.prepare_model(model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
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
        """Make the updates of one rollout.

        Args:
            batch: This rank's rows; every rank has as many.

        Returns:
            Means over the updates, of all ranks, by the names of the trainer's metrics.
        """
        self.model.train()
        found = defaultdict(list)
        for index in self._mini_batches(batch):
            for name, value in self._update(batch.rows(index)).items():
                found[name].append(value)
        return {name: sum(values) / len(values) for name, values in found.items()}

    def _mini_batches(self, batch: ValueBatch) -> Iterator[Tensor]:
        """Rows in a new order each epoch, by the random numbers that a resumed run has again."""
        device = batch.input_ids.device
        for _ in range(self.settings.epochs):
            order = torch.randperm(len(batch.input_ids)).to(device)
            yield from order.chunk(self.settings.mini_batches)

    def _update(self, batch: ValueBatch) -> dict[str, float]:
        """One step on the mean over the trainable tokens of all ranks, in micro-batches."""
        num_tokens = self._total(batch.mask.sum()).clamp(min=1)
        sums = batch.returns.new_zeros(2)
        for index in self._in_pieces(torch.arange(len(batch.mask), device=batch.mask.device)):
            piece = batch.rows(index)
            losses, clipped = self._losses(piece)
            # Gradients of ranks are averaged, so each one's sum counts as many times.
            (losses.sum() * self.accelerator.num_processes / num_tokens).backward()
            sums += torch.stack([losses.detach().sum(), clipped.sum()])
        parameters = self.model.parameters()
        norm = nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss, clip_ratio = (self._total(sums) / num_tokens).tolist()
        found = {"value/loss": loss, "value/grad_norm": norm.item()}
        return found if self.settings.clip is None else {**found, "value/clip_ratio": clip_ratio}

    def _losses(self, piece: ValueBatch) -> tuple[Tensor, Tensor]:
        """Losses of the trainable tokens, and where clipping decided them; elsewhere 0."""
        width = piece.mask.shape[1] + 1
        values = self.model(piece.input_ids, piece.attention_mask, width)[:, :-1]
        losses, clipped = value_losses(values, piece.values, piece.returns, self.settings.clip)
        kept = piece.mask.bool()
        return torch.where(kept, losses, 0.0), clipped & kept

    def _total(self, local: Tensor) -> Tensor:
        total: Tensor = self.accelerator.reduce(local, "sum")
        return total

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to go on to the last bit: weights and optimizer."""
        model = self.accelerator.unwrap_model(self.model)
        return {"model": model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.accelerator.unwrap_model(self.model).load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


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
