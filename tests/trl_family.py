"""Every TRL trainer that can generate with vLLM, on small models without a network."""

import warnings
from importlib import import_module
from typing import Any

import tiny
import torch
import trl_trainer
from datasets import Dataset
from tokenizers import pre_tokenizers
from transformers.trainer_callback import PrinterCallback

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}z{% endif %}"
)
HOMES = {
    "GRPO": "trl",
    "RLOO": "trl",
    "Distillation": "trl",
    "SDFT": "trl.experimental.sdft",
    "SDPO": "trl.experimental.sdpo",
    "GOLD": "trl.experimental.gold",
    "IWOPD": "trl.experimental.iw_opd",
}
_ARGUMENTS: dict[str, Any] = {**trl_trainer.ARGUMENTS, "top_p": 1.0}
_SELF_DISTILLED = {"num_generations": 4, "teacher_model_kind": "live", "distillation_topk": 20}
_MESSAGES = {"max_length": 64, "lmbda": 1.0}
_OWN_ARGUMENTS: dict[str, dict[str, Any]] = {
    "GRPO": {"num_generations": 4},
    "RLOO": {"num_generations": 4, "beta": 0.0},
    "Distillation": {},
    "SDFT": _SELF_DISTILLED,
    "SDPO": {**_SELF_DISTILLED, "success_reward_threshold": 0.4},
    "GOLD": _MESSAGES,
    "IWOPD": _MESSAGES,
}


def trainer_class(kind: str) -> type:
    """TRL's class, without the warning of its experimental modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(import_module(HOMES[kind]), f"{kind}Trainer")


def build(kind: str, tmp_path, **changes: Any) -> Any:
    tokenizer, model = _tokenizer(), changes.pop("model", None) or tiny.build()
    extra = {name: changes.pop(name) for name in ("eval_dataset", "peft_config") if name in changes}
    config = getattr(import_module(HOMES[kind]), f"{kind}Config")
    arguments = {"output_dir": str(tmp_path), **_ARGUMENTS, **_OWN_ARGUMENTS[kind], **changes}
    trainer = trainer_class(kind)(
        model=model,
        args=config(**arguments),
        train_dataset=_dataset(kind),
        **extra,
        processing_class=tokenizer,
        **_partners(kind, tmp_path, tokenizer),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def watch_gaps(trainer, generator) -> list[float]:
    """Per generated row: the largest gap to the model's own scores at that moment."""
    generate, gaps = generator.generate, []

    def watched(prompts, *args, **kwargs):
        result = generate(prompts, *args, **kwargs)
        for prompt, ids, scores in zip(prompts, result[1], result[2], strict=True):
            wanted = tiny.logprobs(trainer.model, prompt, ids, trainer.temperature)
            gaps.append((torch.tensor(scores)[:, 0] - wanted).abs().max().item())
        return result

    generator.generate = watched
    return gaps


def _tokenizer() -> Any:
    """A tokenizer with a chat template that calls itself byte-level, as GOLD needs."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    letters = pre_tokenizers.Split("", "isolated")
    bytes_first = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps = pre_tokenizers.Sequence([bytes_first, letters])
    tokenizer.backend_tokenizer.pre_tokenizer = steps
    return tokenizer


def _partners(kind: str, tmp_path, tokenizer) -> dict[str, Any]:
    """Reward functions, or a teacher with other weights."""
    if kind in ("GRPO", "RLOO", "SDPO"):
        return {"reward_funcs": trl_trainer.reward}
    if kind == "SDFT":
        return {}
    teacher = tiny.build(seed=1)
    if kind == "IWOPD":  # it loads the tokenizer by the teacher's name
        tokenizer.save_pretrained(tmp_path / "teacher")
        teacher.config._name_or_path = str(tmp_path / "teacher")
    return {"teacher_model": teacher}


def _dataset(kind: str) -> Dataset:
    prompts = ["xyzabcdef"[: 2 + i % 7] for i in range(64)]
    if kind in ("SDFT", "SDPO"):
        return Dataset.from_list([{"prompt": p, "privileged_context": "abc"} for p in prompts])
    if kind in ("GOLD", "IWOPD"):
        return Dataset.from_list([{"messages": _conversation(p)} for p in prompts])
    return Dataset.from_list([{"prompt": p} for p in prompts])


def _conversation(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": "abc"}]
