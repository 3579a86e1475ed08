"""Decoder layers compiled once for all of them, or left as they are."""

import logging
import shutil
from dataclasses import replace

import pytest
import tiny
import torch
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map_only

from rollout import EngineConfig, RolloutEngine, SamplingParams
from rollout.exact import ops as exact_ops
from rollout.model import twin
from rollout.model.compile import compiled_layers
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
    with caplog.at_level(logging.WARNING), RolloutEngine(model, CONFIG) as engine:
        assert_generates(engine, model)
        assert not engine.worker.twin.compiled
        assert engine.worker.twin.num_builds == 1
        tiny.assert_on_policy(engine, model)
    messages = [r.getMessage() for r in caplog.records if "compiled" in r.getMessage()]
    assert messages == [
        "decoder layers cannot be compiled and run eagerly: correct, but slower. "
        "Reason: no such operation"
    ]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_in_exact_mode_norms_and_activations_are_left_to_kernels(family, monkeypatch):
    from rollout.exact import compile as compiled_exact

    ran = []
    leave = compiled_exact._ExactReductions.__call__

    def counted(self, graph):
        leave(self, graph)
        ran.extend(str(node.target).removesuffix(".default") for node in graph.nodes)

    monkeypatch.setattr(compiled_exact._ExactReductions, "__call__", counted)
    model = tiny.build(family)
    no_caches = torch._inductor.config.patch(force_disable_caches=True)
    with no_caches, RolloutEngine(model, replace(CONFIG, on_policy="exact")) as engine:
        assert_generates(engine, model)
        assert engine.worker.twin.compiled
        tiny.assert_on_policy(engine, model)
    names = ("mean", "rms_norm", "add_rms_norm", "activation", "silu_and_mul")
    found = {name: ran.count(f"twinslot.{name}") for name in names}
    if family == "qwen3":  # two norms of the layer, and of q and k
        wanted = {"mean": 0, "rms_norm": 3, "add_rms_norm": 1, "activation": 0, "silu_and_mul": 1}
    else:  # norms that multiply by 1 + weight, and GELU; two kinds of layer
        wanted = {"mean": 8, "rms_norm": 0, "add_rms_norm": 0, "activation": 2, "silu_and_mul": 0}
    assert found == wanted
    assert "aten.mean.dim" not in ran


@pytest.mark.parametrize(("exact", "wanted"), [(False, 3), (True, 0)])
def test_in_exact_mode_layers_with_experts_stay_as_they_are(exact, wanted):
    assert len(compiled_layers(tiny.build("qwen3_moe"), exact=exact)) == wanted


def test_a_norm_that_our_kernel_does_not_equal_is_left_alone():
    from rollout.exact.compile import ExactRMSNorm

    for family, wanted in (("qwen3", 4), ("llama", 2), ("gemma2", 0)):
        layer = Twin(tiny.build(family), compiled=True, exact=True).base.model.layers[0]
        assert sum(isinstance(module, ExactRMSNorm) for module in layer.modules()) == wanted


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
