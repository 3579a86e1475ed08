"""The self-check accepts every model that the engine runs rightly, and refuses the others."""

import logging
import shutil

import peft
import pytest
import random_models
import tiny
import torch
from torch import nn
from two_ranks import on_two_ranks

from rollout import EngineConfig, RolloutEngine, SamplingParams, UnsupportedModel

CONFIG = EngineConfig(max_rows=4, page_tokens=4)


def open_and_close(model, **knobs):
    RolloutEngine(model, EngineConfig(max_rows=4, page_tokens=4, **knobs)).close()


@pytest.mark.parametrize("seed", range(18))
def test_random_models_pass(seed):
    """Compiling takes seconds and a C++ compiler, so at most one of them is compiled."""
    case = random_models.draw(seed, compiled=seed == 0 and shutil.which("g++") is not None)
    gaps = random_models.gaps_of(case, case.model())
    assert len(gaps) == 1 + case.knobs["compile_layers"]


@pytest.mark.parametrize(
    ("family", "policy", "tolerance"), [("glm", "exact", 0.1), ("granitemoe_swa", "close", 0.5)]
)
def test_models_that_amplify_rounding_pass(family, policy, tolerance):
    """Under bf16 autocast their logits differ by more than rounding explains elsewhere."""
    knobs = {"on_policy": policy, "compile_layers": False, "fuse_projections": False}
    case = random_models.Case(family, torch.float32, True, 4, 4.0, knobs)
    (gap,) = random_models.gaps_of(case, case.model())
    assert gap > tolerance


SHARDED = """
import logging, random_models
from accelerate import PartialState
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from rollout import EngineConfig, RequestError, RolloutEngine, SamplingParams
rank = PartialState(cpu=True).process_index
logger, gaps = logging.getLogger("rollout"), random_models.Gaps()
logger.addHandler(gaps)
logger.setLevel(logging.INFO)
case = random_models.draw(int(kind))
dtype = torch.bfloat16 if precision == "bf16" else None
model = case.model().float()
with RolloutEngine(model, EngineConfig(max_rows=4), param_dtype=dtype) as engine:
    for layer in (model.base_model.layers if not case.lora_rank else ()):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    modes = [module.training for module in model.modules()]
    try:  # a rank that has failed takes part in the check of the others
        engine.generate([[9, 10], []][rank:][:1], SamplingParams(max_new_tokens=3))
    except RequestError:
        engine.join_gathers(0)
    engine.generate([[9, 10]] * (rank + 1), SamplingParams(max_new_tokens=3))
    assert modes == [module.training for module in model.modules()]
write(gaps.found)
"""


def test_two_ranks_check_sharded_weights_together(tmp_path):
    runs = {"0": (SHARDED, "100", "no"), "1": (SHARDED, "101", "bf16")}
    for first, second in on_two_ranks(tmp_path, runs).values():
        # As the engine opens, and with the sharded tree, where the second rank had failed by then.
        assert (len(first), len(second)) == (2, 1)
        assert first[0] == second[0]


def steer(module, args, output):
    return output + 1.0 if isinstance(output, torch.Tensor) else (output[0] + 1.0, *output[1:])


def in_place(module, args, output):
    (output if isinstance(output, torch.Tensor) else output[0]).mul_(0.5)


def before(module, args, kwargs):
    return (args[0] * 2.0, *args[1:]), kwargs


CHANGING = {
    "steer": lambda layer: layer.register_forward_hook(steer),
    "in_place": lambda layer: layer.mlp.register_forward_hook(in_place),
    "before": lambda layer: layer.register_forward_pre_hook(before, with_kwargs=True),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_hook_that_changes_numbers_is_refused_by_name(name):
    model = tiny.build()
    handle = CHANGING[name](model.model.layers[1])
    with pytest.raises(UnsupportedModel, match=rf"{name}, a forward hook of model.layers.1.*Qwen3"):
        open_and_close(model)
    handle.remove()
    open_and_close(model)


def test_hooks_that_look_on_run_as_before():
    model, seen = tiny.build(), []
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: seen.append(type(module)))
        module.register_forward_pre_hook(lambda module, args: seen.append(type(module)))
        module.register_forward_hook(lambda module, args, output: output)  # the same
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    with RolloutEngine(model, CONFIG) as engine:
        count = len(seen)
        engine.generate([[9, 10]], SamplingParams(max_new_tokens=2))
    assert len(seen) == count  # rollouts run without hooks
    assert hooks == [dict(module._forward_hooks) for module in model.modules()]


class Mixing(nn.Module):
    """Adds the mean over all tokens of the batch."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, states):
        return self.inner(states) + states.mean(dim=(0, 1))


def test_the_first_module_that_differs_is_named():
    model = tiny.build()
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp)
    with pytest.raises(UnsupportedModel, match=r"first module .* is model\.layers\.1\.mlp \(Mixi"):
        open_and_close(model)
    open_and_close(model, self_check=False)


def test_an_adapter_that_mixes_tokens_is_refused():
    targets = {"target_modules": ["q_proj", "v_proj", "up_proj"], "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(tiny.build(), peft.LilyConfig(**targets))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.15)
    with pytest.raises(UnsupportedModel, match="q_proj"):
        open_and_close(model)


def test_a_changed_tree_is_checked_before_the_next_rollout():
    model = tiny.build()
    mlp = model.model.layers[1].mlp
    with RolloutEngine(model, CONFIG) as engine:
        wanted = engine.generate([[9, 10]], SamplingParams(max_new_tokens=4))
        model.model.layers[1].mlp = Mixing(mlp)
        for _ in range(2):  # and again, as long as it differs
            with pytest.raises(UnsupportedModel, match="Mixing"):
                engine.generate([[9, 10]], SamplingParams(max_new_tokens=4))
        assert not engine.busy
        model.model.layers[1].mlp = mlp
        (completion,) = engine.generate([[9, 10]], SamplingParams(max_new_tokens=4))
    assert completion.token_ids == wanted[0].token_ids


def test_float64_runs():
    model = tiny.build().double()
    with RolloutEngine(model, CONFIG) as engine:
        tiny.assert_on_policy(engine, model)


def test_masked_logits_are_equal():
    class Masked(type(tiny.build())):
        def forward(self, *args, logits_to_keep=0, **kwargs):
            output = super().forward(*args, logits_to_keep=logits_to_keep, **kwargs)
            output.logits[..., 50:] = -torch.inf
            return output

    model = tiny.build()
    masked = Masked(model.config)
    masked.load_state_dict(model.state_dict())
    with RolloutEngine(masked, CONFIG) as engine:
        (completion,) = engine.generate([[9, 10]], SamplingParams(max_new_tokens=30))
    assert max(completion.token_ids) < 50


def test_what_it_finds_is_logged(caplog):
    with caplog.at_level(logging.INFO, "rollout"):
        open_and_close(tiny.build())
    (message,) = (m for m in caplog.messages if m.startswith("self-check"))
    assert "of their size" in message
