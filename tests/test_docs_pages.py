"""The pages say what the code does: who writes each event, every field of the summary, and no broken link."""

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.events import schema
from rollart.launch.rundir import add_control
from rollart.launch.simulation import simulate
from scripts.event_reference import read_docstring

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]

NAMES = {
    "tasks.<task>.failed_at": ["<stage> <kind>"],
    "trajectories": ["<status>"],
    "staleness.histogram": ["<age>"],
    "waste": ["<how>"],
    "pools": ["<pool>"],
    "tasks": ["<task>"],
    "cost.pools": ["<pool>"],
    "cost.tasks": ["<task>"],
    "evaluations": ["<name>", "<task>", "<play>"],
    "eval": ["<task>"],
    "faults": ["<kind>"],
    "failures": ["<what>"],
    "reward.judges": ["<reward>"],
}
"""Where the summary has names instead of fixed keys, and how the page writes them, level by level."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_nothing_is_left_to_be_filled_in(page: Path) -> None:
    assert not re.findall(r"\b(?:FIGURES?|TODO|TBD|FIXME|XXX)\b", page.read_text())


# --- what the code does -----------------------------------------------------------------------------------------


def writers() -> dict[str, set[str]]:
    """Kind -> the modules below rollart/ that make such events."""
    kinds = {struct.__name__: kind for kind, struct in schema.KINDS.items()}
    found: dict[str, set[str]] = {kind: set() for kind in schema.KINDS}
    for path in sorted((ROOT / "rollart").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="schema"), attr=name)) if name in kinds:
                    found[kinds[name]].add(str(path.relative_to(ROOT / "rollart").with_suffix("")))
    for kind in ("stall", "deadlock"):  # the watchdog writes both in one place
        found[kind].add("control/watchdog")
    return found


def tiny_job() -> Job:
    """Every kind of name in the summary, and most events: two pools, evaluation, failures, faults, a restart."""
    raw: dict[str, Any] = {
        "name": "tiny",
        "tasks": [
            {"name": "game", "group_size": 2},
            {
                "name": "maths",
                "group_size": 2,
                "rewards": [{"type": "judge", "name": "style", "pool": "judge", "rubric": "short"}],
            },
        ],
        "rollout": {"groups_per_step": 2, "spare_members": 1},
        "pools": [
            {"name": "compute", "hardware": "h800", "engines": {"count": 1}},
            {"name": "bandwidth", "hardware": "h20", "engines": {"count": 1}},
            {"name": "judge", "hardware": "h20", "judge": {}, "engines": {"count": 1}},
            {"name": "environments", "slots": 64},
        ],
        "train": {"steps": 6},
        "checkpoint": {"every": 2},
        "evaluation": {"every": 2, "episodes": 2, "greedy": True},
        "sim": {
            "tasks": {"game": {"failure": 0.2}},
            "faults": [
                {"kind": "engine_death", "at_s": 60},
                {"kind": "bucket_corrupt", "swap": 1},
                {"kind": "reward_error", "at_s": 50},
                {"kind": "trainer_during", "at_s": 70},
                {"kind": "coordinator_restart", "at_s": 120},
            ],
        },
    }
    return build_job(raw)


@dataclass(frozen=True, kw_only=True)
class Run:
    lines: list[dict[str, Any]]
    """Of its events."""
    summary: dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One simulated run, its last evaluation also as its control."""
    out = tmp_path_factory.mktemp("docs") / "run"
    result = simulate(tiny_job(), out)
    assert result.summary.state == "finished"
    *_, plays = result.summary.evaluations.values()
    add_control(out, plays)
    summary = json.loads((out / "summary.json").read_text())
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return Run(lines=lines, summary=summary)


def paths(value: Any, at: str = "") -> Iterator[str]:
    """The key paths of a summary, names replaced by what the page writes for them."""
    if not isinstance(value, dict):
        yield at
        return
    yield from _below(value, at, NAMES.get(at, []))


def _below(value: dict[str, Any], at: str, names: list[str]) -> Iterator[str]:
    for key, inner in value.items():
        path = ".".join(part for part in (at, names[0] if names else key) if part)
        if names[1:]:
            yield from _below(inner, path, names[1:])
        else:
            yield from paths(inner, path)


# --- what the pages say -----------------------------------------------------------------------------------------


def rows(page: str, header: str) -> Iterator[list[str]]:
    """The cells of the rows of all tables of a page whose header begins with this word."""
    inside = False
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == header:
            inside = True
        elif inside and not cells[0].startswith("---"):
            yield cells


def test_an_event_is_written_by_whom_its_struct_names() -> None:
    assert {kind: set(read_docstring(struct).writers) for kind, struct in schema.KINDS.items()} == writers()


def test_every_line_of_a_run_has_all_that_its_struct_needs_and_nothing_else(run: Run) -> None:
    for line in run.lines:
        struct = schema.KINDS[line["e"]]
        required = {field.name for field in msgspec.structs.fields(struct) if field.required}
        assert required <= line.keys() - {"e"} <= set(struct.__struct_fields__)


def test_every_field_of_the_summary_is_documented_and_no_other(run: Run) -> None:
    assert sorted({cells[0].strip("`") for cells in rows("summary.md", "field")}) == sorted(set(paths(run.summary)))


def test_the_promises_are_all_there_and_the_guards_have_a_place() -> None:
    text = (DOCS / "promises.md").read_text(encoding="utf-8")
    assert [int(number) for number in re.findall(r"^## (\d+)\. ", text, flags=re.MULTILINE)] == list(range(1, 11))
    assert "<!-- guards -->" in text.splitlines()


GUARDS = sorted((ROOT / "tests" / "guards").glob("*.patch"))


@pytest.mark.parametrize("guard", [pytest.param(guard, id=guard.stem) for guard in GUARDS])
def test_a_guard_can_still_be_taken_out(guard: Path) -> None:
    """`tests/guards/run.py` sees that something notices; here only that the patch applies."""
    command = ["git", "apply", "--check", "--unsafe-paths", f"--directory={ROOT}", str(guard)]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", text) if not target.startswith(("http", "#"))]
    missing = [target for target in targets if not (page.parent / target.partition("#")[0]).exists()]
    assert missing == []


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_files_named_in_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:rollart|tests|jobs|scripts|docs)/[\w/+.-]+\.(?:py|yaml|md))`", text)
    named += re.findall(r"rollart (?:sim|check) (jobs/[\w+.-]+\.yaml)", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
