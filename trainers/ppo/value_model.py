"""The three value models: a decoder, a decoder that shares the policy's weights, a head alone.

None of them changes a module, parameter, adapter or mode of the policy.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from rollout.errors import UnsupportedTrainer
from rollout.support import adapters_of, base_of

CriticKind = Literal["model", "adapter", "head"]


class ValueModel(nn.Module):
    """A decoder with a linear head that gives one value per position.

    The head starts at zero, so the first advantages are those without a critic. It runs in float32.
    `backbone` is called like a transformers model; its output has `last_hidden_state`.
    """

    def __init__(self, backbone: Any, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = _zero_head(hidden_size)

    @classmethod
    def from_policy(cls, policy: Any) -> Self:
        """Copy the decoder of a causal language model or PEFT model, without its adapters.

        Raises:
            UnsupportedTrainer: The policy's weights are quantised and cannot be trained, or its
                adapters cannot be taken off.
        """
        _check_not_quantised(policy)
        backbone: Any
        if base_of(policy) is not policy:
            backbone = copy.deepcopy(policy).unload().get_decoder()
        elif adapters_of(policy):
            raise UnsupportedTrainer(
                "critic='model' copies the policy without its adapters, but transformers loaded "
                "them into the model itself; load them by peft.PeftModel.from_pretrained(model, "
                "folder, is_trainable=True), or set critic='adapter'"
            )
        else:
            backbone = copy.deepcopy(_decoder(policy))
        return cls(backbone.requires_grad_(True), _hidden_size(policy)).to(_device(backbone))

    @classmethod
    def beside_adapters(cls, policy: Any) -> Self:
        """Share the frozen weights of a PEFT model, and copy the weights that it trains.

        The critic has its own modules. A second adapter in the policy's modules would have to be
        switched on and off in every forward, and would be saved and trained with the policy.

        Raises:
            UnsupportedTrainer: The policy trains all of its decoder, or nothing in it.
        """
        decoder = _decoder(policy)
        # ALIAS: the policy's own parameter objects, so that they stay shared if their storage moves
        frozen: dict[int, Any] = {id(p): p for p in decoder.parameters() if not p.requires_grad}
        num_weights = len(list(decoder.parameters()))
        if len(frozen) in (0, num_weights):
            raise UnsupportedTrainer(
                "critic='adapter' shares the policy's frozen weights and copies the trained ones, "
                f"but of the decoder's {num_weights} weights {len(frozen)} are not trained. Pass "
                "peft_config=LoraConfig(...) with layers of the decoder, or set critic='model'"
            )
        backbone = copy.deepcopy(decoder, frozen)
        return cls(backbone, _hidden_size(policy)).to(_device(decoder))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, num_values: int) -> Tensor:
        """(B, num_values) float32 values of the last `num_values` positions.

        `input_ids` and `attention_mask` are (B, S). A value reads its own token and those before.
        """
        return _values(self.head, self.backbone, input_ids, attention_mask, num_values)


class PolicyHead(nn.Module):
    """A linear head on the policy's last hidden states, from which no gradient reaches the policy.

    The head and the call are those of `ValueModel`.
    """

    def __init__(self, policy: Any) -> None:
        super().__init__()
        # A tuple hides it from `parameters` and `state_dict`: the policy trains and saves it.
        self._decoder = (_decoder(policy),)
        self.head = _zero_head(_hidden_size(policy)).to(_device(policy))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, num_values: int) -> Tensor:
        """See `ValueModel.forward`."""
        (decoder,) = self._decoder
        return _values(self.head, _detached(decoder), input_ids, attention_mask, num_values)


# Each builds the value model of a policy.
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
    """The decoder without dropout, gradients and gradient checkpointing."""

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


def _check_not_quantised(policy: nn.Module) -> None:
    parameters = policy.named_parameters()
    # bitsandbytes can store 4-bit numbers in a floating-point dtype; it then sets `quant_state`.
    packed = [n for n, p in parameters if not p.is_floating_point() or hasattr(p, "quant_state")]
    if packed:
        raise UnsupportedTrainer(
            f"critic='model' trains a copy of the policy, but {len(packed)} weights are quantised, "
            f"such as {packed[0]}; set critic='adapter', which shares them, or critic='head'"
        )


def _zero_head(hidden_size: int) -> nn.Linear:
    # No random initialisation: the trainer draws the same random numbers as without a critic.
    head = nn.utils.skip_init(nn.Linear, hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _decoder(policy: Any) -> Any:
    """The policy's decoder, including its adapters, without the language-model head."""
    base: Any = base_of(policy)
    return base.get_decoder()


def _hidden_size(policy: Any) -> int:
    return int(policy.config.get_text_config().hidden_size)


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
