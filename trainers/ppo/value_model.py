"""What says the values: a decoder of its own, one over weights of the policy, or a head alone.

The policy is the same with each: no module, parameter, adapter or mode of it changes.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from rollout.errors import UnsupportedTrainer

CriticKind = Literal["model", "adapter", "head"]


class ValueModel(nn.Module):
    """A decoder and a linear head from its last hidden state to one number a position.

    The head is zero at first, so that the first advantages are those of no critic at all, and it is
    computed in float32.

    Args:
        backbone: Called as a transformers model; its output has `last_hidden_state`.
        hidden_size: Width of that.
    """

    def __init__(self, backbone: Any, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = _zero_head(hidden_size)

    @classmethod
    def from_policy(cls, policy: Any) -> Self:
        """Start from a copy of the policy's own weights, without its adapters.

        Args:
            policy: A causal language model of transformers, or a PEFT model around one.

        Raises:
            UnsupportedTrainer: Its weights are quantised, and cannot be trained.
        """
        _check_whole(policy)
        adapted = hasattr(policy, "unload")  # PEFT's, whose `base_model` holds the adapters
        backbone = copy.deepcopy(policy).unload().base_model if adapted else None
        backbone = backbone or copy.deepcopy(policy.base_model)
        return cls(backbone.requires_grad_(True), _hidden_size(policy)).to(_device(backbone))

    @classmethod
    def beside_adapters(cls, policy: Any) -> Self:
        """Share what the policy does not train, and start from a copy of what it does.

        The modules are its own. Were its adapter one more of the policy's modules, each pass would
        have to switch adapters, and whoever saves, fingerprints or trains those would find it.

        Args:
            policy: A PEFT model around a causal language model of transformers.

        Raises:
            UnsupportedTrainer: The policy trains all of its decoder, or nothing in it.
        """
        decoder = _decoder(policy)
        # ALIAS: the very parameters of the policy, wherever their storage is moved later
        frozen: dict[int, Any] = {id(p): p for p in decoder.parameters() if not p.requires_grad}
        num_weights = len(list(decoder.parameters()))
        if len(frozen) in (0, num_weights):
            raise UnsupportedTrainer(
                f"critic='adapter' shares the weights that the policy does not train, and has its "
                f"own of the others; here {len(frozen)} of the decoder's {num_weights} are not "
                "trained. Pass peft_config=LoraConfig(...) with layers of the decoder, or use "
                "critic='model'"
            )
        backbone = copy.deepcopy(decoder, frozen)
        return cls(backbone, _hidden_size(policy)).to(_device(decoder))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, num_values: int) -> Tensor:
        """Values at the last positions.

        Args:
            input_ids: (B, S).
            attention_mask: (B, S), 0 for padding.
            num_values: How many positions, from the last one backwards.

        Returns:
            (B, num_values), float32. Each reads its own token and those before it.
        """
        return _values(self.head, self.backbone, input_ids, attention_mask, num_values)


class PolicyHead(nn.Module):
    """A linear head on the policy's last hidden states, which learn nothing from it.

    It starts and computes as that of `ValueModel`, and is called alike.

    Args:
        policy: A causal language model of transformers, or a PEFT model around one.
    """

    def __init__(self, policy: Any) -> None:
        super().__init__()
        # In a tuple, where no module looks for parts: to train and to save is the policy's matter.
        self._decoder = (_decoder(policy),)
        self.head = _zero_head(_hidden_size(policy)).to(_device(policy))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, num_values: int) -> Tensor:
        """Values at the last positions, as `ValueModel.forward`."""
        (decoder,) = self._decoder
        return _values(self.head, _detached(decoder), input_ids, attention_mask, num_values)


# From a policy to the module that says the values.
VALUE_MODELS: dict[CriticKind, Callable[[Any], nn.Module]] = {
    "model": ValueModel.from_policy,
    "adapter": ValueModel.beside_adapters,
    "head": PolicyHead,
}


def _values(
    head: nn.Module,
    decoder: Callable[..., Any],
    input_ids: Tensor,
    attention_mask: Tensor,
    num_values: int,
) -> Tensor:
    output = decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    hidden = output.last_hidden_state[:, -num_values:].float()
    with torch.autocast(hidden.device.type, enabled=False):
        values: Tensor = head(hidden)[..., 0]
    return values


def _detached(decoder: nn.Module) -> Callable[..., Any]:
    """The decoder as it is without dropout, gradients and checkpoints for them."""

    @torch.no_grad()
    def run(**inputs: Any) -> Any:
        with _evaluating(decoder):
            return decoder(**inputs)

    return run


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _check_whole(policy: nn.Module) -> None:
    parameters = policy.named_parameters()
    # bitsandbytes may have 4-bit numbers in storage of any dtype.
    packed = [n for n, p in parameters if not p.is_floating_point() or hasattr(p, "quant_state")]
    if packed:
        raise UnsupportedTrainer(
            f"critic='model' trains a copy of the policy, of which {len(packed)} weights are "
            f"quantised, such as {packed[0]}; use critic='adapter', which shares them, or 'head'"
        )


def _zero_head(hidden_size: int) -> nn.Linear:
    # Without its random start: the trainer's random numbers stay those of a run without critic.
    head = nn.utils.skip_init(nn.Linear, hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _decoder(policy: Any) -> Any:
    """The policy without its language-model head; with its adapters, if it has any."""
    causal = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
    return causal.base_model


def _hidden_size(policy: Any) -> int:
    return int(policy.config.get_text_config().hidden_size)


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
