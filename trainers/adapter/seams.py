"""Where each trainer of TRL takes its rollouts from, and what it sets when it means to.

A trainer that is built with `use_vllm=True` sets some attributes besides `vllm_generation`. The
table says which, so that a trainer that was built without can be given them later.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import trl

from rollout.errors import UnsupportedTrainer

_NEEDED = ("use_vllm", "accelerator", "processing_class", "args", "state", "_metrics")
# What some trainers have no setting for, and do as if it were this.
_ABSENT = {
    "min_p": None,
    "repetition_penalty": 1.0,
    "generation_kwargs": None,
    "loss_type": None,
    "cast_lm_head_to_fp32": False,
    "vllm_structured_outputs_regex": None,
    "use_transformers_continuous_batching": False,
    "_is_vlm": False,
}


@dataclass(frozen=True)
class Seam:
    """One trainer's part in the contract.

    Attributes:
        sets: From the trainer's arguments: what its own `if self.use_vllm:` constructor block sets.
        generates: The method that makes all rollouts of one batch, over all its turns.
        scores: The method whose result holds log-probabilities of rollout and trainer, if any.
        reads_ids: Looks up each token's log-probability by its id.
        patches: Its loss divides logits by the temperature that it has patched the model with.
    """

    sets: Callable[[Any], dict[str, Any]]
    generates: str = "_generate"
    scores: str | None = None
    reads_ids: bool = False
    patches: bool = False


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
    """The table's row for a trainer, or for the class of TRL that it derives from.

    Raises:
        UnsupportedTrainer: There is none, or the trainer lacks what the row says it has.
    """
    name = type(trainer).__name__
    seam = next((SEAMS[base] for base in _trl_bases(trainer) if base in SEAMS), None)
    if seam is None:
        missing = "is not" if hasattr(trainer, "use_vllm") else "has no `use_vllm`, so it is not"
        raise UnsupportedTrainer(
            f"{name} cannot take its rollouts from the engine: it {missing} among the trainers "
            f"that can: {', '.join(SEAMS)}"
        )
    for attribute in (*_NEEDED, seam.generates, *filter(None, [seam.scores])):
        if not hasattr(trainer, attribute):
            raise UnsupportedTrainer(
                f"{name} of TRL {trl.__version__} has no `{attribute}`, which the engine needs to "
                "give it rollouts; call `super().__init__` first, or install a TRL that has it"
            )
    return seam


def _trl_bases(trainer: Any) -> list[str]:
    bases = type(trainer).__mro__
    return [base.__name__ for base in bases if base.__module__.partition(".")[0] == "trl"]


class _FirstOf:
    """Attributes of the first of several objects that has them."""

    def __init__(self, *owners: Any) -> None:
        self._owners = owners

    def __getattr__(self, name: str) -> Any:
        for owner in self._owners:
            if hasattr(owner, name):
                return getattr(owner, name)
        raise AttributeError(name)


def settings_of(trainer: Any) -> Any:
    """A trainer's settings under `GRPOTrainer`'s names, wherever its own class keeps them.

    Some trainers keep a setting in their arguments alone, some have none. Nothing is copied: what
    the user changes on the trainer is seen.
    """
    absent = SimpleNamespace(**_ABSENT, eos_token_ids=_eos_token_ids(trainer))
    arguments = SimpleNamespace(args=_FirstOf(trainer.args, absent))
    return _FirstOf(arguments, trainer, trainer.args, absent)


def _eos_token_ids(trainer: Any) -> list[int]:
    """What ends a completion where a trainer leaves that to vLLM: ids of model and tokenizer."""
    ids = getattr(getattr(trainer.model, "generation_config", None), "eos_token_id", None)
    ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    own = getattr(trainer.processing_class, "eos_token_id", None)
    return ids if own is None or own in ids else [own, *ids]
