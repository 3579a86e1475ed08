"""RolloutConfig on TRL's command line and in its YAML, and the trainer that takes it."""

import inspect
import subprocess
import sys
from dataclasses import dataclass, fields

import pytest
import tiny
import trl_trainer
import yaml
from trl import GRPOConfig, TrlParser

from rollout import ConfigError, RolloutConfig, UnsupportedTrainer
from trainers import RolloutGRPOTrainer
from trainers.arguments import add_help

# Every field, with a value that is not its default.
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
    "entropies": True,
    "kept_mass": True,
    "balance_ranks": True,
    "progress_bar": True,
    "trace": "every:20",
}


def parse(*arguments):
    config, rollout = TrlParser((GRPOConfig, RolloutConfig)).parse_args_and_config(
        ["--output_dir", "outputs", "--use_cpu", "true", "--bf16", "false", *arguments]
    )
    assert type(config) is GRPOConfig
    return rollout


def test_the_values_are_of_every_field_and_no_default():
    assert set(VALUES) == {field.name for field in fields(RolloutConfig)}
    assert all(getattr(RolloutConfig(), name) != value for name, value in VALUES.items())


def test_every_field_is_an_argument():
    arguments = [text for name, value in VALUES.items() for text in (f"--{name}", str(value))]
    assert parse(*arguments) == RolloutConfig(**VALUES)


def test_every_field_may_stand_in_the_yaml(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(VALUES))
    assert parse("--config", str(path)) == RolloutConfig(**VALUES)


def test_defaults_are_the_classes_and_none_may_be_said_in_the_yaml(tmp_path):
    assert parse() == RolloutConfig()
    optional = [f.name for f in fields(RolloutConfig) if f.default is None]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(dict.fromkeys(optional)))
    assert len(optional) > 4
    assert parse("--config", str(path)) == RolloutConfig()


def test_the_command_line_goes_before_the_yaml(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("max_rows: 8\nfuse_projections: true\ncompile_layers: true\n")
    changes = ["--max_rows", "9", "--fuse_projections", "false", "--compile_layers", "no"]
    config = parse("--config", str(path), *changes)
    assert config == RolloutConfig(max_rows=9, compile_layers=False)


def test_a_flag_alone_is_true():
    assert parse("--fuse_projections", "--progress_bar").fuse_projections


def test_a_value_that_cannot_work_is_refused_as_in_python():
    with pytest.raises(ConfigError, match="num_slots=3"):
        parse("--num_slots", "3")


def test_every_argument_has_a_help_text():
    parser = TrlParser((RolloutConfig,))
    texts = {action.dest: action.help for action in parser._actions}
    assert all(len(texts[name]) > 20 for name in VALUES)
    assert texts["num_slots"].startswith("IO slots: 2 overlaps host and device")
    assert "prefill_tokens" in parser.format_help()


def test_a_percent_sign_does_not_break_the_help():
    @dataclass
    class Knobs:
        share: float = 0.5
        """50 % of it,
        or more."""

    add_help(Knobs)
    assert fields(Knobs)[0].metadata["help"] == "50 %% of it, or more."
    assert "50 % of it" in TrlParser((Knobs,)).format_help()


def test_without_source_there_is_no_help_and_no_error(monkeypatch):
    @dataclass
    class Knobs:
        share: float = 0.5
        """Half of it."""

    def unreadable(_):
        raise OSError

    monkeypatch.setattr(inspect, "getsource", unreadable)
    add_help(Knobs)
    assert not fields(Knobs)[0].metadata


def test_the_folder_imports_no_trl_before_it_is_needed():
    code = "import sys, trainers; print({'torch', 'trl'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
    with pytest.raises(ImportError, match="RolloutSFTTrainer"):
        from trainers import RolloutSFTTrainer  # noqa: F401


def arguments(tmp_path, **changes):
    return GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=9,
        max_steps=2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        **changes,
    )


def build(tmp_path, **changes):
    return RolloutGRPOTrainer(
        tiny.build(),
        trl_trainer.reward,
        args=arguments(tmp_path, **changes),
        train_dataset=tiny.dataset(),
        processing_class=tiny.tokenizer(),
        rollout=trl_trainer.ENGINE,
    )


def test_the_one_line_form_attaches_itself(tmp_path):
    trainer = build(tmp_path)
    assert trainer.vllm_generation.config == trl_trainer.ENGINE
    trainer.train()
    assert len(trl_trainer.logged(trainer, "rollout/generated_tok_s")) == 2


def test_the_one_line_form_refuses_as_attach_does(tmp_path):
    with pytest.raises(UnsupportedTrainer, match="RolloutGRPOTrainer cannot use the engine: "):
        build(tmp_path, vllm_structured_outputs_regex="a+")
