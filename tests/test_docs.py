"""The pages match the code: complete tables, working links, commands that parse."""

import ast
import re
import shlex
from dataclasses import fields
from pathlib import Path

import families
import grpo
import pytest
import wrappers
from trl import GRPOConfig, TrlParser

from rollout.telemetry.gpu_counters import GPM_SHARES, NVML_SHARE
from rollout.telemetry.stats import RolloutStats
from rollout.telemetry.time_shares import PARTS
from rollout.tools import bench
from trainers import RolloutConfig, RolloutPPOConfig
from trainers.reporting.dashboard import SECTIONS
from trainers.reporting.metrics import rollout_metrics

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "rollout/README.md",
        "trainers/README.md",
        "examples/README.md",
        "examples/measurements.md",
        ".github/CONTRIBUTING.md",
    )
]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def section(page: Path, title: str) -> str:
    """A section's text with its subsections."""
    match = re.search(rf"^(#+) {title}$(.*?)(?=^#{{1,2}} |\Z)", page.read_text(), re.M | re.S)
    assert match, f"{page} has no section {title}"
    return match[2]


def rows(text: str) -> list[list[str]]:
    """Cells of the rows of all tables, without headers."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def code_blocks(page: Path, language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    return [text for fence, text in blocks if fence == language]


def test_the_readme_is_one_screen_long():
    text = PAGES[0].read_text()
    assert len(text.splitlines()) <= 130
    assert len(text.split()) <= 1300


def test_the_table_of_knobs_is_complete_and_its_defaults_are_true():
    table = {row[0].strip("`"): row[1].strip("`") for row in rows(section(PAGES[2], "Knobs"))}
    wanted = {field.name: repr(field.default).replace("'", '"') for field in fields(RolloutConfig)}
    assert table == wanted


def metrics_in_the_table() -> set[str]:
    names = {row[0].strip("`") for row in rows(section(PAGES[2], "Metrics"))}
    own = ("sampling/", "value/", "returns/", "advantage/", "kl")
    return {name if name.startswith(own) else f"rollout/{name}" for name in names}


def test_the_table_of_metrics_is_complete():
    """Every panel's metric and every metric of a rollout; other tests check whole runs."""
    stats = RolloutStats(
        lengths=[1], cast_bytes=1, device=dict.fromkeys([*GPM_SHARES, NVML_SHARE], 0.5)
    )
    wanted = set(rollout_metrics(stats)) | {f"rollout/time/{part}" for part in PARTS}
    panels = [names for panel in SECTIONS.values() for names in panel.values()]
    wanted |= {name for names in panels for name in names if not name.startswith("profiling/")}
    assert {
        name for name in metrics_in_the_table() if name.startswith(("rollout/", "sampling/"))
    } == wanted


@each_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
            anchors = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
            assert anchor in anchors, f"{page} links to {target}"


@each_page
def test_python_in_a_page_is_python(page):
    for block in code_blocks(page, "python"):
        ast.parse(block)


def commands(page: Path) -> list[list[str]]:
    """Each command in a page's code blocks, split into words."""
    text = "\n".join(code_blocks(page, "")).replace("\\\n", " ")
    lines = (line.partition(" #")[0] for line in text.splitlines())
    return [shlex.split(line) for line in lines if re.match(r"[\w./=]+ ", line)]


@each_page
def test_commands_name_what_there_is(page):
    makefile = (ROOT / "Makefile").read_text()
    for words in commands(page):
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.M), words
        for word in words:
            if re.match(r"(examples|tests|trainers)/\S+\.(py|yaml)$", word):
                assert (ROOT / word).exists(), words


@each_page
def test_arguments_of_the_examples_are_known(page, tmp_path):
    for words in commands(page):
        script = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
        if script is None or words[script] not in ("examples/grpo.py", "examples/ppo.py"):
            continue
        config = RolloutPPOConfig if "ppo" in words[script] else GRPOConfig
        parser = TrlParser((grpo.ScriptArguments, config, RolloutConfig))
        given = [word for word in words[script + 1 :] if word != "..."]
        parser.parse_args_and_config(
            [*given, "--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
        )


@each_page
def test_arguments_of_the_benchmark_are_known(page):
    for arguments in re.findall(r"python -m rollout bench ([^`\n]*)", page.read_text()):
        known = [word for word in shlex.split(arguments, comments=True) if word != "NAME"]
        bench._parser().parse_args([w for w in known if w != "--model" or "NAME" not in arguments])


def test_the_numbers_of_models_are_those_that_tests_run():
    rows = re.findall(r"^\|.*\| (\d+) \|.*\|$", section(ROOT / "README.md", "Which models"), re.M)
    dense = len(families.RUN) - len(families.HYBRIDS)
    assert list(map(int, rows)) == [dense, len(families.HYBRIDS), len(wrappers.RUN)]
