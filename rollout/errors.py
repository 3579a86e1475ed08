"""Everything raised on purpose, as a tree under RolloutError.

RolloutError
 |- ConfigError (ValueError)              a knob of EngineConfig or EngineConfig
 |- RequestError (ValueError)             a prompt, a sampling parameter, a seed
 |- OutOfPages                            KV pages wanted, none free
 |- OutOfMemory (MemoryError)             the GPU has no memory left for a step
 |- EngineBusy                            a call that needs an idle engine
 |- EnginePaused                          a call between pause() and resume(), or resume() alone
 |- EngineClosed                          a call after close()
 |- Unsupported (NotImplementedError)     what the engine refuses, and the way out
     |- UnsupportedModel
     |- UnsupportedTrainer
"""

import functools
import math
from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, TypeVar

T = TypeVar("T")


class RolloutError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(RolloutError, ValueError):
    """A knob has a value that cannot work, or no such knob exists."""


class RequestError(RolloutError, ValueError):
    """A prompt, a sampling parameter or a seed cannot be served."""


class OutOfPages(RolloutError):
    """More KV pages are wanted than are free. Nothing has changed when this is raised."""


class OutOfMemory(RolloutError, MemoryError):
    """The device ran out of memory. Every row has been given up; the engine can be used again."""


class EngineBusy(RolloutError):
    """The call needs an engine without live rows."""


class EnginePaused(RolloutError):
    """The call needs an engine that is not paused, or `resume` one that is."""


class EngineClosed(RolloutError):
    """The engine was closed and holds no memory any more."""


class Unsupported(RolloutError, NotImplementedError):
    """Something the engine refuses by name; the message says why and what to do instead."""


class UnsupportedModel(Unsupported):
    """The model has a part that the engine cannot run."""


class UnsupportedTrainer(Unsupported):
    """The trainer, or the way it is set up, cannot take its rollouts from the engine."""


def refuse_unknown(error: type[RolloutError]) -> Callable[[type[T]], type[T]]:
    """Let a dataclass answer an unknown argument with `error`, which names the closest known one.

    Goes above `@dataclass`. A subclass with fields of its own needs it again.

    Example:
        >>> from dataclasses import dataclass
        >>> @refuse_unknown(ConfigError)
        ... @dataclass
        ... class Knobs:
        ...     max_rows: int = 1
        >>> Knobs(max_row=2)
        Traceback (most recent call last):
        ...
        rollout.errors.ConfigError: Knobs has no 'max_row'; did you mean 'max_rows'?
    """

    def decorate(cls: Any) -> Any:
        init, known = cls.__init__, sorted(field.name for field in fields(cls) if field.init)

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **knobs: Any) -> None:
            for name in knobs:
                if name not in known:
                    close = get_close_matches(name, known, n=1)
                    hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"
                    raise error(f"{cls.__name__} has no {name!r}; {hint}")
            init(self, *args, **knobs)

        cls.__init__ = checked
        return cls

    return decorate


def check_count(error: type[RolloutError], name: str, value: Any, least: int = 1) -> None:
    """Raise `error` unless `value` is a whole number of at least `least`; a bool is not.

    Example:
        >>> check_count(ConfigError, "max_rows", 2.5)
        Traceback (most recent call last):
        ...
        rollout.errors.ConfigError: max_rows=2.5: it must be a whole number of at least 1
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise error(f"{name}={value!r}: it must be a whole number of at least {least}")


def check_choice(error: type[RolloutError], name: str, value: Any, *choices: Any) -> None:
    """Raise `error` unless `value` is one of `choices`, and of the same type: 1 is not True.

    Example:
        >>> check_choice(ConfigError, "kv_keep", "never", "rollout", "always")
        Traceback (most recent call last):
        ...
        rollout.errors.ConfigError: kv_keep='never': it must be 'rollout' or 'always'
    """
    if (type(value), value) not in [(type(choice), choice) for choice in choices]:
        *others, last = map(repr, choices)
        raise error(f"{name}={value!r}: it must be {', '.join(others)} or {last}")


def check_options(options: Any, **least: int) -> None:
    """Raise `ConfigError` unless each named option of a parsed command line is at least so much."""
    for name, count in least.items():
        check_count(ConfigError, f"--{name.replace('_', '-')}", getattr(options, name), count)


def is_real(value: Any) -> bool:
    """Whether `value` is a finite number; a bool is not."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
