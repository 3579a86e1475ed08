"""TRL's generation seam: prompts in, completions and log-probabilities out.

TRL gates importance-sampling correction, `sampling/*` metrics, tools and environments on
`use_vllm`, so the seam that gives all of it is the object TRL calls `vllm_generation`.
"""

import functools
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Self

from rollout.errors import ConfigError, UnsupportedTrainer
from rollout.exact.setup import prepare_trainer
from rollout.request import Completion
from rollout.sampling_params import SamplingParams
from trainers.adapter.engine import open_engine
from trainers.adapter.ranks import Meeting, Phase, agree
from trainers.adapter.row_seeds import RowSeeds
from trainers.adapter.sampling import announce, loss_temperature, row_sampling
from trainers.adapter.seams import find_seam, settings_of
from trainers.config import RolloutConfig
from trainers.reporting.metrics import gap_metrics, log_metrics
from trainers.reporting.reporter import Watch

logger = logging.getLogger(__name__)

_EXACT_GAP = 1e-5
_MISSING = object()


class RolloutGenerator:
    """Hands a stock TRL trainer its rollouts, from an engine on the trainer's own weights.

    Args:
        config: Knobs of the engine.

    Raises:
        ConfigError: It is something else.

    Example:
        ```python
        trainer = GRPOTrainer(model=..., reward_funcs=..., train_dataset=...)
        RolloutGenerator().attach(trainer)
        trainer.train()
        ```

        Or through TRL's documented hook, which leaves out importance-sampling correction,
        `sampling/*` metrics, tools and environments:

        ```python
        trainer = GRPOTrainer(..., rollout_func=RolloutGenerator())
        ```
    """

    def __init__(self, config: RolloutConfig | None = None) -> None:
        if not isinstance(config, RolloutConfig | None):
            raise ConfigError(
                f"config={config!r:.80}: it must be a trainers.RolloutConfig(...), which takes all "
                "arguments of an EngineConfig"
            )
        self.config = config or RolloutConfig()
        self._trainer: Any = None
        self._settings: Any = None
        self._seam: Any = None
        self._num_turns: int | None = None
        self._later_tokens = 0
        self._announced: SamplingParams | None = None
        self._before: dict[str, Any] = {}
        self._warned = False

    def attach(self, trainer: Any) -> Self:
        """Become the trainer's generator. Call it after construction, before `train()`.

        Args:
            trainer: A stock TRL trainer that can generate through vLLM, built with
                `use_vllm=False`: `GRPOTrainer`, `RLOOTrainer`, or another one of `seams.SEAMS`.

        Returns:
            This generator.

        Raises:
            UnsupportedTrainer: The trainer or its settings; the message says what to change.
            UnsupportedModel: The model; likewise.
        """
        if getattr(trainer, "rollout_func", None) is not None:
            raise UnsupportedTrainer(
                "the trainer has a rollout_func, which TRL would go on calling; drop it, or pass "
                "this generator as rollout_func instead of attaching it"
            )
        self._open(trainer)
        for name, value in self._seam.sets(trainer.args).items():
            self._replace(name, value)
        self._replace("vllm_generation", self)
        self._replace("use_vllm", True)
        return self

    def detach(self) -> None:
        """Leave the trainer as it was, and give the engine's memory back."""
        trainer = self._trainer
        if trainer is None:
            return
        for name, value in self._before.items():
            if value is _MISSING:
                delattr(trainer, name)
            else:
                setattr(trainer, name, value)
        self._before = {}
        self._watch.close()
        self._undo_exact()
        self.engine.close()
        self._trainer = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Serve as TRL's `rollout_func`.

        Args:
            prompts: Raw prompts of this rank, each repeated `num_generations` times.
            trainer: The trainer that asks.

        Returns:
            `prompt_ids`, `completion_ids` and `logprobs`, a list a row each.

        Raises:
            UnsupportedTrainer: The trainer or its settings; the message says what to change.
            UnsupportedModel: The model; likewise.
        """
        if getattr(trainer, "tools", None):  # TRL makes later turns itself, and trips over them
            raise UnsupportedTrainer(
                "a rollout_func cannot serve tools and environments: TRL does not ask it for the "
                "turns that follow a tool's result; drop rollout_func, and attach this generator"
            )
        if self._trainer is None:
            self._open(trainer)
        if trainer is not self._trainer:
            raise UnsupportedTrainer("this generator already serves a trainer; make a new one")
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        try:
            prompt_ids, completion_ids, logprobs, _ = self.generate(prompt_ids, images, 1)
        finally:
            self._sleep()  # TRL's `_generate` was not wrapped yet when it made the first call
        flat = [[token[0] for token in row] for row in logprobs]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": flat}

    def sync_weights(self) -> None:
        """Do nothing: the weights are the trainer's own, and each rollout looks at them anew.

        TRL calls this when its global step has changed, which is not every time they change.
        """

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
            num_generations: Of no influence: one completion a row.
            profiler: Entered while generating.

        Returns:
            Prompt ids, completion ids, log-probabilities `[row][token][0]`, and, for trainers that
            read them, the ids they belong to in the same shape. Log-probabilities are natural
            logarithms at the trainer's temperature over the full vocabulary.

        Raises:
            RolloutError: Any rank failed; raised on all of them, and no rank has a result. In a
                later turn of a tool loop, which ranks reach as often as their own rows call tools,
                a rank fails alone, and its end ends the others as any error in a trainer does.
                So does an interrupt, which must not wait for ranks that may be anywhere.
        """
        later_turn, failure = bool(self._num_turns), None
        completions: Sequence[Completion] = ()
        num_tokens = 0
        if not later_turn:
            self._meeting = self._meet()
        try:
            if images is not None:
                raise UnsupportedTrainer("the engine cannot take images; use text alone")
            with profiler or nullcontext():
                completions, num_tokens = self._rollout(prompts, same_weights=later_turn)
        except Exception as error:
            failure = error
        if not later_turn:
            self._watch.counted(self._meeting.end(failure, num_tokens))
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
        """What TRL's tool loop reads of a vLLM engine: `llm_engine.model_config.max_model_len`."""
        model_config = SimpleNamespace(max_model_len=self.engine.max_row_tokens)
        return SimpleNamespace(llm_engine=SimpleNamespace(model_config=model_config))

    def _open(self, trainer: Any) -> None:
        """Check the trainer, build the engine on its model, and watch its weights."""
        if self._trainer is not None:
            raise UnsupportedTrainer("this generator already serves a trainer; make a new one")
        self.engine = open_engine(trainer, self.config)
        self._undo_exact = _nothing
        try:
            if self.config.exact:
                model = trainer.accelerator.unwrap_model(trainer.model)
                self._undo_exact = prepare_trainer(model, self.engine.exact_shapes)
            self._watch = Watch(trainer, self.engine, self.config)
        except BaseException:
            self._undo_exact()
            self.engine.close()
            raise
        self._trainer, self._settings = trainer, settings_of(trainer)
        self._seam = find_seam(trainer)
        self._seeds, self._loss_temperature = RowSeeds(trainer), None
        if self._seam.patches:
            model = trainer.accelerator.unwrap_model(trainer.model)
            self._loss_temperature = loss_temperature(model)
        self._wrap(self._seam.generates, self._share_version)
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
        """The completions of these prompts, and how many tokens this rank has generated."""
        self._announced = announce(self._settings, self._announced, self._loss_temperature)
        rows: Sequence[list[int]] = prompts
        seeds: Sequence[int] = self._seeds.draw(len(prompts))
        meeting = None if same_weights else self._meeting
        if meeting:
            rows, seeds = meeting.hand_out(rows, seeds)
        sampling = [self._sampling(prompt) for prompt in rows]
        # Weights change in ways that no callback tells of: averaged ones swapped in for an
        # evaluation, a checkpoint loaded. So only turns of one `_generate` share a version.
        most_tokens = max((each.max_new_tokens for each in sampling), default=0)
        with self._watch.rollout(len(rows), most_tokens):
            generated = self.engine.generate(rows, sampling, seeds, same_weights=same_weights)
        self._watch.rolled_out(rows, generated)
        num_tokens = sum(len(completion.token_ids) for completion in generated)
        completions = meeting.bring_back(generated) if meeting else generated
        if self._num_turns is not None:
            self._num_turns += 1
        return completions, num_tokens

    def _meet(self) -> Meeting:
        """The collectives that the ranks have before them, as a rollout begins."""
        accelerator = self._trainer.accelerator
        return Meeting(accelerator, self.engine, balance=self.config.balance_ranks)

    def _share_version(self, generate: Any, *batch: Any) -> Any:
        """Run the trainer's own method that makes all rollouts of a batch, on the same weights.

        The turns keep their pages, and with the last one their memory goes to the trainer.
        """
        self._num_turns, self._later_tokens, self._meeting = 0, 0, self._meet()
        try:
            generated = generate(*batch)
        except Exception as error:
            # A prompt of this rank is at fault, and the others generate from theirs.
            if self._meeting.phase is not Phase.DONE:
                self._meeting.end(error, 0)
            raise
        finally:
            self._num_turns = None
            failure = self._try_to_sleep()
        # Here ranks meet again, however many turns each has taken.
        self._watch.counted(agree(self._trainer.accelerator, failure, self._later_tokens))
        return generated

    def _try_to_sleep(self) -> Exception | None:
        """Sleep; what has gone wrong, if anything has."""
        try:
            self._sleep()
        except Exception as error:
            return error
        return None

    def _sleep(self) -> None:
        """Leave the memory to the trainer until the next rollout, unless told to keep it."""
        if self.config.kv_keep == "rollout" and not self.engine.asleep:
            self.engine.sleep()
        self._watch.rested()

    def _sampling(self, prompt: Sequence[int]) -> SamplingParams:
        """The trainer's settings, clipped to what the row can hold as vLLM does."""
        room = max(self.engine.max_row_tokens - len(prompt), 1)
        return row_sampling(self._settings, room)

    def _score_and_log_gap(self, score: Any, inputs: Any) -> Any:
        """Run TRL's `_generate_and_score_completions`, and log how far the two sides are apart."""
        scored = score(inputs)
        metrics = gap_metrics(self._trainer, scored, sample=self.config.exact)
        log_metrics(self._trainer, metrics)
        largest = metrics.get("rollout/logp_gap_max", 0.0)
        if self.config.exact and largest > _EXACT_GAP and not self._warned:
            self._warned = True
            logger.warning(
                "on_policy='exact', and a log-probability of the rollout is %.1e from the "
                "trainer's; `python -m rollout doctor --exact` finds the layer",
                largest,
            )
        return scored


def _nothing() -> None:
    """There is nothing to undo."""
