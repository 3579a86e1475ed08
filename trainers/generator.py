"""The object that TRL calls `vllm_generation`: prompts in, completions and log-probabilities out.

TRL offers importance-sampling correction, `sampling/*` metrics, tools and environments only with
`use_vllm`. So the generator takes vLLM's place.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Self

import torch

from rollout.errors import ConfigError, UnsupportedTrainer
from rollout.exact.setup import prepare_trainer
from rollout.request import Completion
from rollout.sampling_params import SamplingParams
from trainers.adapter.engine import open_engine
from trainers.adapter.ranks import Phase, RolloutCollectives, agree
from trainers.adapter.row_seeds import RowSeeds
from trainers.adapter.sampling import (
    announce,
    loss_temperature,
    row_sampling,
    warn_of_masked_stops,
)
from trainers.adapter.seams import Settings, find_seam
from trainers.adapter.vllm_arguments import log_without_effect
from trainers.config import RolloutConfig
from trainers.reporting.metrics import gap_metrics, log_metrics
from trainers.reporting.reporter import Reporter

logger = logging.getLogger(__name__)

_EXACT_GAP = 1e-5
# Mean |difference| of log-probabilities, in nats a token, beyond what rounding explains: random
# weights, which amplify it, reach 0.05 in bfloat16 (examples/measurements.md).
_CLOSE_GAPS = {torch.float16: 0.05, torch.bfloat16: 0.15}
_WIDE_GAP = 1e-3  # in float32 and float64
_MISSING = object()


class RolloutGenerator:
    """Generates a stock TRL trainer's rollouts, with an engine on the trainer's own weights.

    Example:
        ```python
        trainer = GRPOTrainer(model=..., reward_funcs=..., train_dataset=...)
        RolloutGenerator().attach(trainer)
        trainer.train()
        ```

        TRL's documented hook works, too. TRL then leaves out importance-sampling correction,
        `sampling/*` metrics, tools and environments:

        ```python
        trainer = GRPOTrainer(..., rollout_func=RolloutGenerator())
        ```
    """

    def __init__(self, config: RolloutConfig | None = None, **knobs: Any) -> None:
        if knobs:
            named = ", ".join(f"{name}={value!r:.40}" for name, value in knobs.items())
            raise ConfigError(
                f"RolloutGenerator takes its knobs in a config; write "
                f"RolloutGenerator(RolloutConfig({named}))"
            )
        if not isinstance(config, RolloutConfig | None):
            raise ConfigError(
                f"config={config!r:.80}: must be a trainers.RolloutConfig(...); it has all knobs "
                "of EngineConfig"
            )
        self.config = config or RolloutConfig()
        self._trainer: Any = None
        self._settings: Any = None
        self._seam: Any = None
        self._num_turns: int | None = None
        self._later_tokens = 0
        self._announced: SamplingParams | None = None
        self._before: dict[str, Any] = {}
        self._said: set[str] = set()  # warnings that are given once

    def attach(self, trainer: Any) -> Self:
        """Become the trainer's generator. Call it after construction, before `train()`.

        Args:
            trainer: One of the TRL trainers in `seams.SEAMS`, built with `use_vllm=False`.

        Raises:
            UnsupportedTrainer: The engine cannot serve the trainer or one of its settings.
            UnsupportedModel: The engine cannot run the model.
        """
        if getattr(trainer, "rollout_func", None) is not None:
            raise UnsupportedTrainer(
                "the trainer has a rollout_func, and TRL would keep calling it; drop it, or pass "
                "this generator as rollout_func instead of attaching it"
            )
        self._open(trainer)
        for name, value in self._seam.sets(trainer.args).items():
            self._replace(name, value)
        self._replace("vllm_generation", self)
        self._replace("use_vllm", True)
        if hasattr(trainer, "vllm_mode"):
            # TRL's tool loop asks for the longest sequence in this mode alone.
            self._replace("vllm_mode", "colocate")
        log_without_effect(trainer.args)
        return self

    def detach(self) -> None:
        """Restore the trainer's attributes, close the engine and release its memory."""
        trainer = self._trainer
        if trainer is None:
            return
        for name, value in self._before.items():
            if value is _MISSING:
                delattr(trainer, name)
            else:
                setattr(trainer, name, value)
        self._before = {}
        self._reporter.close()
        self._undo_exact()
        self.engine.close()
        self._trainer = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Serve as TRL's `rollout_func`. The first call checks the trainer as `attach` does.

        Args:
            prompts: Raw prompts of this rank, each repeated `num_generations` times.

        Returns:
            `prompt_ids`, `completion_ids` and `logprobs`, each with one list per row.
        """
        if getattr(trainer, "tools", None):  # TRL would raise a TypeError after a tool call
            raise UnsupportedTrainer(
                "a rollout_func cannot serve tools and environments: TRL does not call it again "
                "after a tool's result; drop rollout_func, and attach this generator"
            )
        if self._trainer is None:
            self._open(trainer)
        if trainer is not self._trainer:
            raise UnsupportedTrainer("this generator already serves a trainer; make a new one")
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        try:
            prompt_ids, completion_ids, logprobs, _ = self.generate(prompt_ids, images, 1)
        finally:
            self._sleep()  # the first call comes from a `_generate` that is not wrapped yet
        flat = [[token[0] for token in row] for row in logprobs]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": flat}

    def sync_weights(self) -> None:
        """Do nothing: each rollout reads the trainer's own weights."""

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[
        list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]] | None
    ]:
        """Generate one completion for each prompt.

        Args:
            prompts: Token ids of each row, already repeated `num_generations` times.
            images: Must be `None`.
            num_generations: Ignored; TRL has already repeated the prompts.
            profiler: Entered while generating.

        Returns:
            Prompt ids, completion ids, log-probabilities `[row][token][0]` and scored ids in the
            same shape (`None` if the trainer does not read them). Log-probabilities are natural
            logarithms at the trainer's temperature, over the full vocabulary.

        Raises:
            RolloutError: A rank failed; every rank raises. Exceptions: in later turns of a tool
                loop ranks are not synchronised, so a failing rank raises alone. An interrupt also
                does not wait for other ranks. The launcher then ends the job.
        """
        later_turn, failure = bool(self._num_turns), None
        completions: Sequence[Completion] = ()
        num_tokens = 0
        if not later_turn:
            self._collectives = self._new_collectives()
        try:
            if images is not None:
                raise UnsupportedTrainer(
                    "this batch has images, and the engine runs text alone; train on text, or "
                    "generate without the engine"
                )
            with profiler or nullcontext():
                completions, num_tokens = self._rollout(prompts, same_weights=later_turn)
        except Exception as error:
            failure = error
        if not later_turn:
            self._reporter.add_tokens(self._collectives.end(failure, num_tokens))
        elif failure is not None:
            raise failure
        else:
            self._later_tokens += num_tokens
        completion_ids = [completion.token_ids for completion in completions]
        logprobs = [[[value] for value in completion.logprobs] for completion in completions]
        scored_ids = None
        if self._seam.reads_ids:
            scored_ids = [[[token] for token in ids] for ids in completion_ids]
        return prompts, completion_ids, logprobs, scored_ids

    @property
    def llm(self) -> SimpleNamespace:
        """TRL's tool loop reads `llm.llm_engine.model_config.max_model_len`."""
        model_config = SimpleNamespace(max_model_len=self.engine.max_row_tokens)
        return SimpleNamespace(llm_engine=SimpleNamespace(model_config=model_config))

    def _open(self, trainer: Any) -> None:
        """Check the trainer, build the engine on its model and wrap the trainer's methods."""
        if self._trainer is not None:
            raise UnsupportedTrainer("this generator already serves a trainer; make a new one")
        self.engine = open_engine(trainer, self.config)
        self._undo_exact: Callable[[], None] = lambda: None
        try:
            if self.config.exact:
                model = trainer.accelerator.unwrap_model(trainer.model)
                self._undo_exact = prepare_trainer(model, self.engine.exact_shapes)
            self._reporter = Reporter(trainer, self.engine, self.config)
        except BaseException:
            self._undo_exact()
            self.engine.close()
            raise
        self._trainer, self._settings = trainer, Settings(trainer)
        warn_of_masked_stops(self._settings)
        self._seam = find_seam(trainer)
        self._seeds, self._loss_temperature = RowSeeds(trainer), None
        if self._seam.patches:
            model = trainer.accelerator.unwrap_model(trainer.model)
            self._loss_temperature = loss_temperature(model)
        self._wrap(self._seam.generates, self._share_version)
        self._wrap("_prepare_inputs", self._prepare_and_sleep)
        if self._seam.scores is not None:
            self._wrap(self._seam.scores, self._score_and_log_gap)

    def _wrap(self, name: str, wrapper: Any) -> None:
        self._replace(name, functools.partial(wrapper, getattr(self._trainer, name)))

    def _replace(self, name: str, value: Any) -> None:
        """Set an attribute of the trainer until `detach`."""
        self._before[name] = vars(self._trainer).get(name, _MISSING)
        setattr(self._trainer, name, value)

    def _rollout(
        self, prompts: list[list[int]], *, same_weights: bool
    ) -> tuple[Sequence[Completion], int]:
        """Return the completions of `prompts` and the number of tokens this rank generated."""
        self._settings.refresh()
        self._announced = announce(self._settings, self._announced, self._loss_temperature)
        rows: Sequence[list[int]] = prompts
        seeds: Sequence[int] = self._seeds.draw(len(prompts))
        collectives = None if same_weights else self._collectives
        if collectives:
            rows, seeds = collectives.distribute(rows, seeds)
        sampling = [self._sampling(prompt) for prompt in rows]
        most_tokens = max((each.max_new_tokens for each in sampling), default=0)
        # No callback reports every change of weights (a loaded checkpoint, averaged weights for an
        # evaluation). So only the turns of one `_generate` share a policy version.
        with self._reporter.rollout(len(rows), most_tokens):
            generated = self.engine.generate(rows, sampling, seeds, same_weights=same_weights)
        self._reporter.log_rollout(rows, generated)
        num_tokens = sum(len(completion.token_ids) for completion in generated)
        completions = collectives.collect(generated) if collectives else generated
        if self._num_turns is not None:
            self._num_turns += 1
        return completions, num_tokens

    def _new_collectives(self) -> RolloutCollectives:
        accelerator = self._trainer.accelerator
        return RolloutCollectives(accelerator, self.engine, balance=self.config.balance_ranks)

    def _share_version(self, generate: Any, *batch: Any) -> Any:
        """Run the trainer's own `generate`; all its turns share one policy version and their pages.

        After the last turn the trainer gets the memory.
        """
        self._num_turns, self._later_tokens = 0, 0
        self._collectives = self._new_collectives()
        try:
            generated = generate(*batch)
        except Exception as error:
            # The other ranks may be generating; join their remaining collectives.
            if self._collectives.phase is not Phase.DONE:
                self._collectives.end(error, 0)
            raise
        finally:
            self._num_turns = None
            failure = self._try_to_sleep()
        # Every rank gets here once, after any number of turns.
        self._reporter.add_tokens(agree(self._trainer.accelerator, failure, self._later_tokens))
        return generated

    def _try_to_sleep(self) -> Exception | None:
        try:
            self._sleep()
        except Exception as error:
            return error
        return None

    def _sleep(self) -> None:
        """Release the engine's memory until the next rollout, unless `kv_keep` is "always"."""
        if self.config.kv_keep == "rollout" and not self.engine.asleep:
            self.engine.sleep()
        self._reporter.log_times()

    def _prepare_and_sleep(self, prepare: Any, *inputs: Any) -> Any:
        """Run the trainer's own `_prepare_inputs`; a reward function in it may wake the engine."""
        prepared = prepare(*inputs)
        if not self.engine.busy:
            self._sleep()
        return prepared

    def _sampling(self, prompt: Sequence[int]) -> SamplingParams:
        """The trainer's settings, with lengths clipped to `max_row_tokens` as vLLM does."""
        longest, most = self.engine.max_row_tokens, self._settings.max_completion_length
        room = max(longest - len(prompt), 1)
        if room < most:
            self._warn_once(
                "a prompt of %d tokens leaves room for %d of max_completion_length=%d tokens: a "
                "row has at most %d (max_row_tokens, vllm_max_model_length, or the model's length)",
                *(len(prompt), room, most, longest),
            )
        return row_sampling(self._settings, room)

    def _warn_once(self, text: str, *values: Any) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning(text, *values)

    def _score_and_log_gap(self, score: Any, inputs: Any) -> Any:
        """Run TRL's `_generate_and_score_completions` and log the log-probability gap."""
        scored = score(inputs)
        metrics = gap_metrics(self._trainer, scored, sample=self.config.exact)
        log_metrics(self._trainer, metrics)
        self._warn_of_gap(metrics)
        return scored

    def _warn_of_gap(self, metrics: dict[str, float]) -> None:
        largest, mean = metrics.get("rollout/logp_gap_max", 0.0), metrics.get("rollout/logp_gap", 0)
        if self.config.exact and largest > _EXACT_GAP:
            self._warn_once(
                "on_policy='exact', but a log-probability differs by %.1e between rollout and "
                "trainer (expected: at most %.0e). Training goes on; `python -m rollout doctor "
                "--exact` names the layer that differs",
                *(largest, _EXACT_GAP),
            )
        most = _CLOSE_GAPS.get(self.engine.dtype, _WIDE_GAP)
        if mean > most:
            self._warn_once(
                "the log-probabilities of rollout and trainer differ by %.1e nats a token in the "
                "mean; rounding explains about %.0e. Training goes on, but check what changes the "
                "trainer's forward alone: dropout, a hook, a patched forward; a new engine's "
                "self-check names the module",
                *(mean, most),
            )
