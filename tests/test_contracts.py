"""House rules that no linter knows.

Each rule is a function from text to its violations, so that a test can show it a broken text.
"""

import ast
import doctest
import importlib
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rollout", "trainers")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
ENGINE_SOURCES = [path for path in SOURCES if path.is_relative_to(ROOT / "rollout")]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TORCH_FREE = next(
    contract["source_modules"]
    for contract in PYPROJECT["tool"]["importlinter"]["contracts"]
    if contract["name"] == "the host half knows no tensor"
)

BLOCKING = {"item", "tolist", "cpu", "synchronize", "nonzero"}
MAX_LINES, MAX_FILES = 600, 20


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=name_of)


# --- only tagged lines wait for the device


def comments(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def imports_torch(source: str) -> bool:
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module)
    return any(name.split(".")[0] == "torch" for name in imported)


def untagged_waits(source: str) -> list[str]:
    """Calls without a `# SYNC:` tag that may make the host wait, if the file imports torch.

    A call over several lines may have its tag on any of them.
    """
    if not imports_torch(source):
        return []
    tagged = {line for line, comment in comments(source).items() if "# SYNC: " in comment}
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        receiver = node.func.value
        is_numpy = isinstance(receiver, ast.Name) and receiver.id in ("np", "numpy")
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if node.func.attr in BLOCKING and not is_numpy and tagged.isdisjoint(lines):
            found.append(f"{node.func.end_lineno}: .{node.func.attr}()")
    return found


@each(ENGINE_SOURCES)
def test_host_waits_only_where_tagged(path):
    found = untagged_waits(path.read_text(encoding="utf-8"))
    assert not found, f"{name_of(path)} may wait for the device without a `# SYNC: why`: {found}"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("x.item()", ["2: .item()"]),
        ("x.item()  # SYNC: the one wait of a step", []),
        ("x.item()  # SYNC:", ["2: .item()"]),
        ("x.item(), '# SYNC: text in a string'", ["2: .item()"]),
        ("(x\n  .view(-1)\n  .tolist())", ["4: .tolist()"]),
        ("(x\n  .view(-1)\n  .tolist()  # SYNC: rows are done\n)", []),
        ("torch.nonzero(x)", ["2: .nonzero()"]),
        ("np.nonzero(x)", []),
        ("x.item, torch.device('cpu')", []),
    ],
)
def test_untagged_waits_are_found(body, found):
    assert untagged_waits(f"import torch\n{body}\n") == found
    assert untagged_waits(f"from torch import Tensor\n{body}\n") == found
    assert untagged_waits(f"import numpy as np\n{body}\n") == []


# --- tags carry a reason


def malformed_tags(source: str) -> list[str]:
    """Tags that grep would miss or that give no reason; the form is `# ORDER: why`."""
    tags = re.compile(r"# ?(?:SYNC|ORDER|ALIAS)\b")
    well_formed = re.compile(r"# (?:SYNC|ORDER|ALIAS): \S")
    return [
        f"{line}: {comment}"
        for line, comment in comments(source).items()
        for tag in tags.finditer(comment)
        if not well_formed.match(comment, tag.start())
    ]


@each(SOURCES)
def test_tags_say_why(path):
    found = malformed_tags(path.read_text(encoding="utf-8"))
    assert not found, f"{name_of(path)}: write `# ORDER: why`, not {found}"


def test_malformed_tags_are_found():
    fine = "x = 1  # noqa: E501  # ALIAS: the trainer's storage\n# ORDER: waits `computed`\n"
    assert malformed_tags(fine) == []
    for tag in ("# ORDER:", "# ORDER: ", "#ORDER: why", "# ALIAS why", "# SYNC:why"):
        assert malformed_tags(f"x = 1  {tag}\n") == [f"1: {tag}"]


# --- the host half imports no torch


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def modules_below(package: str) -> list[str]:
    modules = [module_of(path) for path in SOURCES]
    return [each for each in modules if f"{each}.".startswith(f"{package}.")]


@pytest.mark.parametrize("package", TORCH_FREE)
def test_imports_no_torch(package):
    modules = ", ".join(["rollout", *modules_below(package)])
    code = f"import sys, {modules}; print(*sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "", f"importing {package} imports {result.stdout.strip()}"


# --- public names, examples, version


def test_public_names_are_sorted_and_exist():
    rollout = importlib.import_module("rollout")
    names = list(rollout.__all__)
    assert names == sorted(set(names))
    missing = [name for name in names if not hasattr(rollout, name)]
    assert not missing, f"rollout.__all__ promises {missing}"


@each(ENGINE_SOURCES)
def test_examples_in_docstrings_are_true(path):
    assert doctest.testmod(importlib.import_module(module_of(path))).failed == 0


def test_version_is_the_changelogs():
    changelog = (ROOT / ".github" / "CHANGELOG.md").read_text(encoding="utf-8")
    assert PYPROJECT["project"]["version"] == newest_version(changelog)


def newest_version(changelog: str) -> str:
    headings = re.findall(r"^## \[?([^\]\s]+)\]?", changelog, flags=re.MULTILINE)
    return next(heading for heading in headings if heading.lower() != "unreleased")


def test_newest_version_is_found():
    assert newest_version("# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2030-01-01\n") == "1.2.0"
    assert newest_version("## 0.3.1\n\n### Added\n\n## 0.3.0\n") == "0.3.1"


# --- sizes of files and folders


@each(SOURCES)
def test_file_fits_in_a_head(path):
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_LINES, f"{name_of(path)} has {num_lines} lines, at most {MAX_LINES}"


ROOMS = sorted({path.parent for path in SOURCES})


@each(ROOMS)
def test_room_is_small(path):
    most = 10 if path.name in PACKAGES else MAX_FILES
    files = [each.name for each in path.glob("*.py")]
    assert len(files) <= most, f"{name_of(path)} has {len(files)} files, at most {most}"


@each([path for path in ROOMS if path.name not in PACKAGES])
def test_room_says_what_it_is_for_and_exports_nothing(path):
    body = ast.parse((path / "__init__.py").read_text(encoding="utf-8")).body
    assert len(body) == 1
    docstring = ast.get_docstring(ast.Module(body, []))
    assert docstring
    assert "\n" not in docstring


# --- names

PRIVATE = {"held", "narrow", "life", "marks", "how", "found"}
ALONE = {"keep", "words", "few_rows", "block_table"}
SOFTMAX = {"peak", "peaks", "total", "totals", "mixed", "fade", "fades"}  # m, l, acc, alpha
OTHERS = {"mixed_precision", "PackageNotFoundError"}  # accelerate's and Python's


def identifiers(source: str) -> set[str]:
    named = {
        ast.FunctionDef: "name",
        ast.ClassDef: "name",
        ast.arg: "arg",
        ast.keyword: "arg",
        ast.Name: "id",
        ast.Attribute: "attr",
    }
    nodes = ast.walk(ast.parse(source))
    found = {getattr(node, named[type(node)]) for node in nodes if type(node) in named}
    return found - {None} - OTHERS


def private_names(source: str, *, is_kernel: bool) -> list[str]:
    """Identifiers in our own dialect although the field has a word."""

    def is_private(name: str) -> bool:
        parts = set(re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_"))
        alone = name.strip("_").lower()
        return bool(parts & PRIVATE or alone in ALONE or (is_kernel and parts & SOFTMAX))

    return sorted(filter(is_private, identifiers(source)))


@each(SOURCES)
def test_names_are_the_fields(path):
    is_kernel = path.parent.name == "kernels"
    assert not private_names(path.read_text(encoding="utf-8"), is_kernel=is_kernel)
    assert path.stem not in PRIVATE | ALONE


def test_private_names_are_found():
    source = "def keep(held_pages): howto = HeldBack(found=peak)"
    assert private_names(source, is_kernel=False) == ["HeldBack", "found", "held_pages", "keep"]
    assert "peak" in private_names(source, is_kernel=True)


@each(SOURCES)
def test_no_class_is_changed_under_an_object(path):
    assert not re.search(r"__class__\s*=[^=]", path.read_text(encoding="utf-8"))


# --- documents


@each([ROOT / "README.md", ROOT / "examples/README.md", ROOT / ".github/CHANGELOG.md"])
def test_no_placeholder_is_left(path):
    """A missing number is written in capitals, such as SEED2, until it is known."""
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"\b(?:TABLE|TREE|COMMIT|TBD|XXX|[A-Z]+ROW|SEED\d)\b", text)
