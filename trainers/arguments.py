"""Help texts for a config's arguments on a command line, from the docstrings of its fields."""

import ast
import inspect
import textwrap
from dataclasses import fields
from itertools import pairwise
from types import MappingProxyType
from typing import Any


def add_help(config: type[Any]) -> None:
    """Put each field's docstring where `TrlParser` looks for a help text.

    Args:
        config: A dataclass with a docstring below each field. Where its source is not there to be
            read, the arguments work without help.
    """
    try:
        source = inspect.getsource(config)
    except OSError:
        return
    texts = _docstrings(source)
    for field in fields(config):
        if field.name in texts:  # and not one of a class that it extends
            metadata = {**field.metadata, "help": texts[field.name]}
            field.metadata = MappingProxyType(metadata)


def _docstrings(source: str) -> dict[str, str]:
    """Name of a field -> what stands below it, on one line; argparse would read a lone `%`."""
    (definition,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for node, below in pairwise(definition.body):
        match node, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split()).replace("%", "%%")
    return found
