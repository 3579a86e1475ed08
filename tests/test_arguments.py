"""Knobs on TRL's command line and in its YAML, and the one-line trainer that takes them."""

import subprocess
import sys
from dataclasses import fields

import pytest
import tiny
import trl_trainer
import yaml
from transformers import HfArgumentParser
from trl import GRPOConfig, TrlParser

from rollout import ConfigError, EngineConfig, UnsupportedTrainer
from trainers import RolloutConfig, RolloutGRPOTrainer, RolloutPPOConfig

# Every field with a value other than its default.
VALUES = {
    "max_rows": 8,
    "max_row_tokens": 64,
    "page_tokens": 4,
    "kv_bytes": 1 << 20,
    "kv_fraction": 0.25,
    "train_reserve_bytes": 1 << 30,
    "kv_keep": "always",
    "offload_bytes": 0,
    "prefill_tokens": 16,
    "num_slots": 1,
    "on_policy": "exact",
    "compile_layers": False,
    "enforce_eager": True,
    "fuse_projections": True,
    "self_check": False,
    "entropies": True,
    "kept_mass": True,
    "balance_ranks": True,
    "trace": "every:20",
}
OPTIONAL = [field.name for field in fields(RolloutConfig) if field.default is None]


def parse(*arguments, config=GRPOConfig):
    trl, rollout = TrlParser((config, RolloutConfig)).parse_args_and_config(
        ["--output_dir", "outputs", "--use_cpu", "true", "--bf16", "false", *arguments]
    )
    assert type(trl) is config
    return rollout


def test_every_field_is_an_argument_and_may_stand_in_the_yaml(tmp_path):
    wanted, path = RolloutConfig(**VALUES), tmp_path / "config.yaml"
    assert set(VALUES) == {field.name for field in fields(RolloutConfig)}
    assert all(getattr(RolloutConfig(), name) != value for name, value in VALUES.items())
    arguments = [word for name, value in VALUES.items() for word in (f"--{name}", str(value))]
    path.write_text(yaml.safe_dump(VALUES))
    assert parse(*arguments) == parse("--config", str(path)) == wanted
    assert HfArgumentParser(RolloutConfig).parse_args_into_dataclasses(arguments) == (wanted,)
    # Defaults are the class's, a flag alone is true, and the command line wins over the YAML.
    path.write_text(yaml.safe_dump(dict.fromkeys(OPTIONAL)))
    assert parse("--config", str(path)) == parse() == RolloutConfig()
    path.write_text("max_rows: 8\nfuse_projections: true\ncompile_layers: true\n")
    changes = ["--max_rows", "9", "--fuse_projections", "false", "--compile_layers", "no"]
    config = parse("--config", str(path), *changes, "--kept_mass")
    assert config == RolloutConfig(
        max_rows=9, fuse_projections=False, compile_layers=False, kept_mass=True
    )


def test_a_value_that_cannot_work_is_refused_as_in_python():
    with pytest.raises(ConfigError, match="num_slots=3"):
        parse("--num_slots", "3")


@pytest.mark.parametrize("kind", [EngineConfig, RolloutConfig, RolloutPPOConfig])
def test_every_argument_has_a_help_text(kind):
    parser = TrlParser((kind,))
    texts = {action.dest: action.help for action in parser._actions}
    grpos = {field.name: field.metadata.get("help") for field in fields(GRPOConfig)}
    for field in fields(kind):
        if texts[field.name] != grpos.get(field.name):  # inherited help texts are TRL's
            assert len(texts[field.name]) > 20, field.name
    assert texts.get("epsilon") == (grpos["epsilon"] if kind is RolloutPPOConfig else None)
    printed = " ".join(parser.format_help().split())
    last = "Critic updates per epoch" if kind is RolloutPPOConfig else "IO slots: 2 overlaps host"
    assert last in printed


def test_the_doors_import_no_torch_before_it_is_needed():
    code = "import sys, trainers, rollout; print({'torch', 'trl'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
    with pytest.raises(ImportError, match="RolloutSFTTrainer"):
        from trainers import RolloutSFTTrainer  # noqa: F401
    with pytest.raises(ImportError, match="RolloutConfig"):
        from rollout import RolloutConfig  # noqa: F401


def build(tmp_path, **changes):
    arguments = {**trl_trainer.ARGUMENTS, "num_generations": 4, "max_steps": 2, **changes}
    return RolloutGRPOTrainer(
        tiny.build(),
        trl_trainer.reward,
        args=GRPOConfig(output_dir=str(tmp_path), **arguments),
        train_dataset=tiny.dataset(),
        processing_class=tiny.tokenizer(),
        rollout=trl_trainer.ENGINE,
    )


def test_the_one_line_form_attaches_itself_and_refuses_as_attach_does(tmp_path):
    trainer = build(tmp_path)
    assert trainer.vllm_generation.config == trl_trainer.ENGINE
    trainer.train()
    assert len(trl_trainer.logged(trainer, "rollout/generated_tok_s")) == 2
    with pytest.raises(UnsupportedTrainer, match="RolloutGRPOTrainer cannot use the engine: "):
        build(tmp_path, vllm_structured_outputs_regex="a+")
