"""Random small models, to try the self-check on: it must accept each of them.

`python tests/random_models.py 200` tries 200 and prints the largest gaps by dtype, with and without
experts.
"""

import logging
import random
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from families import HYBRIDS, RUN, config_of
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from rollout import EngineConfig, RolloutEngine, SamplingParams
from rollout.support import base_of, experts_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """A model and how a trainer and an engine treat it."""

    family: str
    dtype: torch.dtype
    autocast: bool
    lora_rank: int
    scale: float
    knobs: dict[str, Any]

    @property
    def computes(self) -> str:
        return f"{self.dtype}, autocast" if self.autocast else f"{self.dtype}"

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(self.family))
        if self.lora_rank:
            lora = {"target_modules": "all-linear", "init_lora_weights": False}
            model = get_peft_model(model, LoraConfig(r=self.lora_rank, **lora))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(self.scale)
        return model.to(self.dtype)

    def open(self, model: nn.Module) -> RolloutEngine:
        config = EngineConfig(max_rows=4, page_tokens=4, prefill_tokens=20, **self.knobs)
        return RolloutEngine(
            model, config, autocast_dtype=torch.bfloat16 if self.autocast else None
        )


def draw(seed: int, *, compiled: bool | None = None) -> Case:
    """A case that depends on the seed alone, but for `compiled`."""
    chooser = random.Random(seed)
    autocast = chooser.random() < 0.3
    knobs = {
        "on_policy": chooser.choice(("close", "exact")),
        "compile_layers": chooser.random() < 0.1,
        "fuse_projections": chooser.random() < 0.5,
    }
    case = Case(
        family=chooser.choice(sorted(RUN)),
        dtype=torch.float32 if autocast else chooser.choice(DTYPES),
        autocast=autocast,
        lora_rank=chooser.choice((0, 0, 4)),
        scale=chooser.choice((1.0, 2.0, 4.0)),
        knobs=knobs,
    )
    if compiled is not None:
        knobs["compile_layers"] = compiled
    if case.family in HYBRIDS:
        knobs["on_policy"] = "close"  # exact mode refuses them
    if case.family == "phimoe":
        case = replace(case, lora_rank=0)  # PEFT wraps its router, which returns two tensors
    return case


class Gaps(logging.Handler):
    """Collects the gaps that self-checks log."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("self-check"):
            self.found.append(record.args[0])


def gaps_of(case: Case, model: nn.Module) -> list[float]:
    """Gaps that the self-check finds, as the engine opens and once it is compiled."""
    logger, gaps = logging.getLogger("rollout"), Gaps()
    logger.addHandler(gaps)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with case.open(model) as engine:
            engine.generate([[9, 10, 11]], SamplingParams(max_new_tokens=2))
    finally:
        logger.removeHandler(gaps)
        logger.setLevel(level)
    return gaps.found


def main(count: int) -> None:
    largest: defaultdict[str, list[float]] = defaultdict(list)
    for seed in range(count):
        torch.compiler.reset()  # it compiles no more than 8 models otherwise
        case = draw(seed)
        model = case.model()
        kind = f"{case.computes}, experts" if any(experts_of(base_of(model))) else case.computes
        try:
            gap = max(gaps_of(case, model))
        except Exception as error:
            print(seed, case, f"{type(error).__name__}: {error}", flush=True)
        else:
            largest[kind].append(gap)
    for kind, gaps in sorted(largest.items()):
        print(f"{kind}: {len(gaps)} models, largest gap {max(gaps):.1e}")


if __name__ == "__main__":
    logging.getLogger("rollout").addHandler(logging.NullHandler())
    logging.lastResort = None
    torch.set_num_threads(1)
    main(int(sys.argv[1]))
