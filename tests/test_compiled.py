"""Decoder layers compiled once for all of them, or left as they are."""

import logging
import shutil
from dataclasses import replace

import pytest
import tiny
import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map_only

from rollout import EngineConfig, RolloutEngine, SamplingParams
from rollout.exact import ops as exact_ops
from rollout.exact.setup import prepare_trainer
from rollout.model import twin
from rollout.model.twin import Twin

CONFIG = EngineConfig(
    max_rows=4, page_tokens=4, prefill_tokens=20, compile_layers=True, fuse_projections=True
)
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, eos_token_ids=(tiny.EOS,))


def assert_generates(engine, model):
    prompts = tiny.prompts(9, longest=30)
    completions = engine.generate(prompts, GREEDY)
    model.eval()
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == tiny.greedy(model, prompt, 6)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_one_compilation_serves_every_layer_size_and_update():
    model = tiny.build()
    counters.clear()
    with RolloutEngine(model, CONFIG) as engine:
        assert_generates(engine, model)
        assert engine.worker.twin.compiled
        assert engine.worker.twin.num_fused == 6
        assert engine.stats.warmup_s > 0
        for parameter in model.parameters():
            parameter.data.mul_(1.1)
        assert_generates(engine, model)
        tiny.assert_on_policy(engine, model)
    assert counters["stats"]["unique_graphs"] == 1


def test_layers_that_cannot_be_compiled_run_as_they_are_and_say_so(monkeypatch, caplog):
    def compile_layers(base, exact):
        for layer in base.model.layers:
            layer.forward = broken

    def broken(*args, **kwargs):
        raise RuntimeError("no such operation\nand more")

    monkeypatch.setattr(twin, "compile_layers", compile_layers)
    model = tiny.build()
    config = replace(CONFIG, self_check=False)  # which would run the broken layers
    with caplog.at_level(logging.WARNING), RolloutEngine(model, config) as engine:
        assert_generates(engine, model)
        assert not engine.worker.twin.compiled
        assert engine.worker.twin.num_builds == 1
        tiny.assert_on_policy(engine, model)
    messages = [r.getMessage() for r in caplog.records if "compiled" in r.getMessage()]
    assert messages == [
        "decoder layers cannot be compiled, so they run eagerly (correct, but slower): "
        "no such operation"
    ]


# Of one layer. The norm after a sum calls the plain one here; Gemma's multiply by 1 + weight.
OPERATORS = {
    "qwen3": {"rms_norm": 4, "add_rms_norm": 1, "silu_and_mul": 1},
    "gemma2": {"mean": 4, "activation": 1},
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("family", OPERATORS)
def test_in_exact_mode_norms_and_activations_are_left_to_kernels(family):
    model = tiny.build(family)
    with RolloutEngine(model, replace(CONFIG, on_policy="exact")) as engine:
        assert_generates(engine, model)
        assert engine.worker.twin.compiled
        tiny.assert_on_policy(engine, model)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            engine.generate([[9], [10], [11], [12]], GREEDY)
    counts = {event.key: event.count for event in profiler.key_averages()}
    layers = counts["twinslot::attend_and_store"]
    for name in ("mean", "rms_norm", "add_rms_norm", "activation", "silu_and_mul"):
        wanted = OPERATORS[family].get(name, 0)
        assert counts.get(f"twinslot::{name}", 0) == wanted * layers, name


@pytest.mark.parametrize(
    ("family", "exact", "num_compiled", "num_norms"),
    [
        ("qwen3", True, 3, 4),
        ("llama", True, 3, 2),
        ("gemma2", True, 3, 0),  # whose norms round otherwise than our kernel
        ("nanochat", True, 3, 0),  # whose norms have no weight
        ("qwen3_moe", True, 0, 0),  # a last bit decides which expert a token goes to
        ("qwen3_moe", False, 3, 0),
    ],
)
def test_what_is_compiled_and_which_norms_are_ours(family, exact, num_compiled, num_norms):
    from rollout.exact.compile import ExactRMSNorm

    layers = Twin(tiny.build(family), compiled=True, exact=exact).base.model.layers
    assert sum("forward" in vars(layer) for layer in layers) == num_compiled
    assert sum(isinstance(module, ExactRMSNorm) for module in layers[0].modules()) == num_norms


def test_a_trainers_compiled_layers_share_a_graph_in_exact_mode():
    model = tiny.build("qwen2").eval()
    undo = prepare_trainer(model, dict.fromkeys([(24, 48), (48, 48), (48, 64)], 10))
    counters.clear()
    for layer in model.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    model(torch.tensor([[9, 10, 11]]), use_cache=False)
    assert counters["stats"]["unique_graphs"] == 1
    undo()


def half(*shape):
    return torch.randn(shape).bfloat16()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("skinny_linear", (half(5, 256), half(128, 256), None)),
        ("skinny_linear", (half(1, 40, 256), half(128, 256), half(128))),
        ("mean", (torch.randn(5, 256), [-1], True)),
        ("rms_norm", (half(5, 256), half(256), 1e-6)),
        ("rms_norm", (half(5, 256), torch.randn(256), 1e-6)),
        ("add_rms_norm", (half(5, 256), half(5, 256), half(256), 1e-6)),
        ("activation", (half(5, 256), 0)),
        ("silu_and_mul", (half(5, 256), half(5, 256))),
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_operators_are_what_a_compiler_takes_them_for(name, arguments, device, monkeypatch):
    """New tensors of those shapes and dtypes: nothing looks at each call."""
    monkeypatch.setattr(exact_ops, "activations", [torch.nn.SiLU()])
    operator = getattr(torch.ops.twinslot, name).default
    moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), arguments)
    torch.library.opcheck(operator, moved, test_utils=("test_schema", "test_faketensor"))
