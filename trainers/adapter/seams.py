"""Where the generator plugs into each of TRL's trainers.

A trainer built with `use_vllm=True` sets more attributes than `vllm_generation`. `SEAMS` lists
them, so that `attach` can set them on a trainer built without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import trl

from rollout.errors import UnsupportedTrainer
from trainers.adapter.generation_config import changed_settings

_NEEDED = ("use_vllm", "accelerator", "processing_class", "args", "state", "_metrics")
# Settings that some trainers lack, and the values that describe what they do.
_ABSENT = {
    "min_p": None,
    "repetition_penalty": 1.0,
    "generation_kwargs": None,
    "loss_type": None,
    "cast_lm_head_to_fp32": False,
    "vllm_structured_outputs_regex": None,
    "vllm_max_model_length": None,
    "mask_truncated_completions": False,
    "use_transformers_continuous_batching": False,
}


@dataclass(frozen=True)
class Seam:
    """What `attach` needs to know of one trainer class."""

    sets: Callable[[Any], dict[str, Any]]  # arguments -> attributes that `use_vllm=True` adds
    generates: str = "_generate"  # the method that generates one batch, with all its turns
    scores: str | None = None  # the method that returns log-probabilities of rollout and trainer
    reads_ids: bool = False  # the trainer looks up each log-probability by its token id
    patches: bool = False  # the trainer patches the model's forward to divide by the temperature


def _loads_each_step(args: Any) -> dict[str, Any]:
    return {"_last_loaded_step": -1}


SEAMS = {
    "GRPOTrainer": Seam(_loads_each_step, scores="_generate_and_score_completions", patches=True),
    "RLOOTrainer": Seam(_loads_each_step, patches=True),
    "DistillationTrainer": Seam(_loads_each_step),
    "SDFTTrainer": Seam(_loads_each_step),
    "SDPOTrainer": Seam(_loads_each_step),
    "GOLDTrainer": Seam(
        lambda args: {
            "vllm_sync_frequency": args.vllm_sync_frequency,
            "_last_vllm_sync_step": -args.vllm_sync_frequency,
        },
        generates="_generate_on_policy_for_slices",
    ),
    "IWOPDTrainer": Seam(
        lambda args: {
            "vllm_sync_frequency": args.vllm_sync_frequency,
            "_last_vllm_sync_step": -1,
        },
        generates="_generate_student_completions",
        reads_ids=True,
    ),
}


def find_seam(trainer: Any) -> Seam:
    """The seam of the trainer's class, or of the first TRL class that it derives from.

    Raises:
        UnsupportedTrainer: `SEAMS` has no such class, or the trainer lacks an attribute.
    """
    name = type(trainer).__name__
    bases = [b.__name__ for b in type(trainer).__mro__ if b.__module__.partition(".")[0] == "trl"]
    seam = next((SEAMS[base] for base in bases if base in SEAMS), None)
    if seam is None:
        reason = "it" if hasattr(trainer, "use_vllm") else "it has no `use_vllm`, so it"
        raise UnsupportedTrainer(
            f"{name} cannot use the engine: {reason} is not among the supported trainers: "
            f"{', '.join(SEAMS)}"
        )
    for attribute in (*_NEEDED, seam.generates, *filter(None, [seam.scores])):
        if not hasattr(trainer, attribute):
            raise UnsupportedTrainer(
                f"{name} of TRL {trl.__version__} has no `{attribute}`, which the engine needs; "
                "call `super().__init__` first, or install a TRL version that has it"
            )
    return seam


class _FirstOf:
    """Reads each attribute from the first of several objects that has it."""

    def __init__(self, *owners: Any) -> None:
        self._owners = owners

    def __getattr__(self, name: str) -> Any:
        for owner in self._owners:
            if hasattr(owner, name):
                return getattr(owner, name)
        raise AttributeError(name)


class Settings(_FirstOf):
    """A live view of a trainer's settings under `GRPOTrainer`'s names.

    Some trainers keep a setting only in their arguments, some lack it. Later changes show; those
    of `trainer.generation_config` after `refresh`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._absent = SimpleNamespace(**_ABSENT, eos_token_ids=_eos_token_ids(trainer))
        eos = SimpleNamespace(eos_token_ids=self._absent.eos_token_ids)
        self._as_built = _FirstOf(trainer.args, eos, trainer, self._absent)
        self._kwargs = getattr(trainer.args, "generation_kwargs", None) or {}
        self.refresh()

    def refresh(self) -> None:
        """Read `trainer.generation_config` again."""
        trainer, absent = self._trainer, self._absent
        own, others = changed_settings(trainer, self._as_built, self._kwargs)
        others = {**(getattr(trainer.args, "generation_kwargs", None) or {}), **others}
        args = _FirstOf(SimpleNamespace(generation_kwargs=others or None), trainer.args, absent)
        self._owners = (SimpleNamespace(**own, args=args), trainer, trainer.args, absent)


def tokenizer_of(trainer: Any) -> Any:
    """The trainer's tokenizer, which a processor of images and text holds."""
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def _eos_token_ids(trainer: Any) -> list[int]:
    """EOS ids of tokenizer and model, as vLLM collects them for a trainer that sets none."""
    ids = getattr(getattr(trainer.model, "generation_config", None), "eos_token_id", None)
    ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    own = getattr(tokenizer_of(trainer), "eos_token_id", None)
    return ids if own is None or own in ids else [own, *ids]
