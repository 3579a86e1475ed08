"""Every error that this project raises on purpose derives from RolloutError.

RolloutError
 |- ConfigError (ValueError)              a knob of EngineConfig or RolloutConfig
 |- RequestError (ValueError)             a prompt, a sampling parameter, a seed
 |- OutOfPages                            a row needs more KV pages than memory allows
 |- OutOfMemory (MemoryError)             the GPU ran out of memory
 |- EngineBusy                            the call needs an idle engine
 |- EnginePaused                          a call between pause() and resume(), or resume() alone
 |- EngineClosed                          a call after close()
 |- Unsupported (NotImplementedError)     what the engine refuses, and what to do instead
     |- UnsupportedModel
     |- UnsupportedTrainer
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")


class RolloutError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(RolloutError, ValueError):
    """A knob is unknown or has an invalid value."""


class RequestError(RolloutError, ValueError):
    """A prompt, a sampling parameter or a seed is invalid."""


class OutOfPages(RolloutError):
    """A row needs more KV pages than memory allows. The engine has changed nothing."""


class OutOfMemory(RolloutError, MemoryError):
    """The device ran out of memory. The engine dropped every row and can be used again."""


class EngineBusy(RolloutError):
    """The call needs an idle engine, and rows are unfinished."""


class EnginePaused(RolloutError):
    """The engine is paused; or `resume` was called and it is not paused."""


class EngineClosed(RolloutError):
    """The engine was closed. Its memory is released."""


class Unsupported(RolloutError, NotImplementedError):
    """The engine refuses this case. The message says why and what to do instead."""


class UnsupportedModel(Unsupported):
    """The model has a part that the engine cannot run."""


class UnsupportedTrainer(Unsupported):
    """The engine cannot serve this trainer or one of its settings."""


def refuse_unknown(
    error: type[RolloutError], others: Mapping[str, str] = MappingProxyType({})
) -> Callable[[type[T]], type[T]]:
    """Decorate a dataclass so that an unknown argument raises `error` with the closest known name.

    Put it above `@dataclass`. A subclass that adds fields needs it again.

    Args:
        others: What to write instead of a name that another library uses, with or without `vllm_`.

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
                    raise error(f"{cls.__name__} has no {name!r}; {_hint(name, known, others)}")
            init(self, *args, **knobs)

        cls.__init__ = checked
        return cls

    return decorate


def _hint(name: str, known: Sequence[str], others: Mapping[str, str]) -> str:
    if instead := others.get(name.removeprefix("vllm_")):
        return instead
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"


def check_count(error: type[RolloutError], name: str, value: Any, least: int = 1) -> None:
    """Raise `error` unless `value` is an integer >= `least`. A bool is not an integer here."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise error(f"{name}={value!r}: must be an integer >= {least}")


def check_choice(error: type[RolloutError], name: str, value: Any, *choices: Any) -> None:
    """Raise `error` unless `value` equals one of `choices` and has its type: 1 is not True."""
    if (type(value), value) not in [(type(choice), choice) for choice in choices]:
        *others, last = map(repr, choices)
        raise error(f"{name}={value!r}: must be {', '.join(others)} or {last}")


def check_options(options: Any, **least: int) -> None:
    """Raise `ConfigError` unless each named command-line option is an integer >= its `least`."""
    for name, bound in least.items():
        check_count(ConfigError, f"--{name.replace('_', '-')}", getattr(options, name), bound)


def is_real(value: Any) -> bool:
    """Whether `value` is a finite number. A bool is not a number here."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
