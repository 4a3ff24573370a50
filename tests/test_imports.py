"""Who may import whom: DESIGN.md section 4 as a table, checked on the source of every module under rollart/.

Imports are read with `ast`, those inside functions and under TYPE_CHECKING included. A module without a row in
`MAY_IMPORT` fails, so a new one is placed on purpose.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

SHARED = frozenset({"types", "ports", "errors", "append", "events", "config", "hardware"})
ADAPTERS = frozenset({"engines", "envs", "rewards", "weights", "train", "cluster", "sim", "records"})
FOLDS = frozenset({"types", "errors", "events", "causes", "costs"})
VALUES = SHARED | {"samples", "wire"}
READERS = frozenset({"summary", "audit", "trackers", "explain"})
PARTS = VALUES | ADAPTERS | {"policy", "control", "tasks", "model", "models", "packed", "agreement"} | READERS
ROOTS = frozenset(
    {
        "worlds",
        "run",
        "training",
        "chaos",
        "bench",
        "worker",
        "resources",
        "real",
        "setups",
        "checks",
        "resume",
        "shapes",
    }
)
"""Composition: the few modules that know everything."""

MAY_IMPORT: dict[str, frozenset[str]] = {
    "": frozenset(),
    "types": frozenset(),
    "ports": frozenset({"types"}),
    "errors": frozenset({"types"}),
    "append": frozenset({"errors"}),
    "events": frozenset({"types", "errors", "append"}),
    "hardware": frozenset({"types"}),
    "config": frozenset({"types", "errors", "hardware"}),
    "policy": frozenset({"types", "hardware"}),
    "control": SHARED | {"policy", "causes"},
    "causes": frozenset(),
    "costs": frozenset({"events"}),
    "samples": frozenset({"types"}),
    "wire": frozenset({"types"}),
    "packed": frozenset(),
    "reduced": frozenset(),
    "agreement": SHARED | {"reduced"},
    "model": SHARED | {"packed", "agreement", "reduced"},
    "models": SHARED | {"tasks"},  # the tiny model's words come from its tasks
    "tasks": SHARED,
    **dict.fromkeys(ADAPTERS, VALUES),
    "engines": VALUES | {"model", "packed", "agreement"},
    "train": VALUES | {"model"},
    "envs": VALUES | {"tasks"},  # user code is found and run through `tasks`
    "rewards": VALUES | {"tasks"},
    "summary": FOLDS | {"summary_tasks", "summary_evals", "summary_timings"},
    "summary_tasks": FOLDS,
    "summary_evals": FOLDS,
    "summary_timings": FOLDS,
    "audit": FOLDS | {"audit_tasks"},
    "audit_tasks": FOLDS,
    "explain": FOLDS,
    "show": FOLDS | {"summary"},
    "reading": FOLDS | {"records"},
    "trackers": FOLDS | {"config"},
    **dict.fromkeys(ROOTS, PARTS | ROOTS),
    "cli": frozenset({"errors", "commands"}),
    "commands": PARTS | ROOTS | {"show", "reading"},
    "__main__": frozenset({"cli"}),
}
"""By first name below `rollart` ("" is rollart/__init__.py): what it may import. A package may import itself."""

AT_TOP: dict[str, frozenset[str]] = {"cli": frozenset({"errors", "commands"}), "commands": frozenset({"errors"})}
"""Modules that may import only these at module level, and the rest of their row inside functions: start-up time."""

LIGHT = VALUES | {
    "",
    "causes",
    "costs",
    "records",
    "policy",
    "control",
    "cli",
    "commands",
    "summary",
    "summary_tasks",
    "summary_evals",
    "summary_timings",
    "audit",
    "audit_tasks",
    "explain",
    "show",
    "reading",
    "run",
    "chaos",
}
HEAVY = frozenset({"torch", "transformers", "ray", "vllm"})
"""No LIGHT module imports these, not even inside a function."""

ONLY_IN = {"ray": "cluster"}
"""A library that one package keeps to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported name, as `rollart.policy.routing` or `torch.nn`."""

    name: str
    line: int
    deferred: bool
    """Inside a function or under TYPE_CHECKING: not run when the module is imported."""


def imports_in(node: ast.AST, package: str, deferred: bool = False) -> Iterator[Import]:
    """Every import below `node`. `package` is what relative imports start from."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import():
                for alias in child.names:
                    yield Import(name=alias.name, line=child.lineno, deferred=deferred)
            case ast.ImportFrom():
                start = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
                base = ".".join([*start, *([child.module] if child.module else [])])
                for alias in child.names:
                    yield Import(name=f"{base}.{alias.name}", line=child.lineno, deferred=deferred)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield Import(name=name, line=child.lineno, deferred=deferred)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from imports_in(child, package, deferred=True)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                yield from imports_in(child, package, deferred=True)
            case _:
                yield from imports_in(child, package, deferred)


def layer_of(module: str) -> str:
    """The row of `MAY_IMPORT`: `rollart.policy.routing` -> `policy`."""
    return module.split(".")[1] if "." in module else ""


def broken_rules(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """What the imports of this module break, one sentence each."""
    layer = layer_of(module)
    if layer not in MAY_IMPORT:
        return [f"{module}: has no row in MAY_IMPORT; add one to tests/test_imports.py"]
    found: list[str] = []
    package = module if is_package else module.rpartition(".")[0]
    for item in imports_in(ast.parse(source), package):
        where = f"{module} line {item.line}"
        top, _, rest = item.name.partition(".")
        target = rest.partition(".")[0]
        if top != "rollart":
            if top in HEAVY and layer in LIGHT:
                found.append(f"{where}: {layer or 'rollart'} may not import {top}")
            if top in ONLY_IN and layer != ONLY_IN[top]:
                found.append(f"{where}: only rollart.{ONLY_IN[top]} may import {top}")
        elif target == layer or target not in MAY_IMPORT or not target:
            continue  # itself, or a plain name of rollart/__init__.py
        elif target not in MAY_IMPORT[layer]:
            found.append(f"{where}: {layer or 'rollart'} may not import {target}")
        elif layer in AT_TOP and not item.deferred and target not in AT_TOP[layer]:
            found.append(f"{where}: {layer} may import {target} inside a function only")
    return found


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted((ROOT / "rollart").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


@pytest.mark.parametrize(("module", "path"), [pytest.param(*found, id=found[0]) for found in modules()])
def test_imports_keep_their_direction(module: str, path: Path) -> None:
    assert broken_rules(module, path.read_text(), is_package=path.name == "__init__.py") == []


BROKEN = [
    ("rollart", "from rollart.types import Task", "rollart may not import types"),
    ("rollart", "import torch", "rollart may not import torch"),
    ("rollart.types", "import rollart.errors", "types may not import errors"),
    ("rollart.types", "def f():\n    import torch", "types may not import torch"),
    ("rollart.ports", "from rollart.errors import EnvError", "ports may not import errors"),
    ("rollart.ports", "from vllm import LLM", "ports may not import vllm"),
    ("rollart.errors", "from rollart import events", "errors may not import events"),
    ("rollart.errors", "import torch", "errors may not import torch"),
    ("rollart.events", "from rollart.config.job import Job", "events may not import config"),
    ("rollart.events", "import ray", "events may not import ray"),
    ("rollart.hardware", "from rollart.config.job import Job", "hardware may not import config"),
    ("rollart.hardware", "import torch.cuda", "hardware may not import torch"),
    ("rollart.config.load", "from rollart.events import Event", "config may not import events"),
    ("rollart.config.load", "def f():\n    from transformers import AutoConfig", "config may not import transformers"),
    ("rollart.policy.routing", "from rollart.ports import Engine", "policy may not import ports"),
    ("rollart.policy.routing", "from rollart.config.job import Job", "policy may not import config"),
    ("rollart.policy.routing", "from ..control import proxy", "policy may not import control"),
    ("rollart.policy.routing", "import torch", "policy may not import torch"),
    ("rollart.control.proxy", "from rollart.engines import embedded", "control may not import engines"),
    ("rollart.control.proxy", "from rollart.sim.clock import Clock", "control may not import sim"),
    ("rollart.control.proxy", "async def f():\n    import ray", "control may not import ray"),
    ("rollart.control.proxy", "import importlib\nimportlib.import_module('vllm')", "control may not import vllm"),
    ("rollart.engines.vllm", "from rollart.control.proxy import Proxy", "engines may not import control"),
    ("rollart.engines.vllm", "from rollart.policy import routing", "engines may not import policy"),
    ("rollart.engines.vllm", "from rollart.weights import shm", "engines may not import weights"),
    ("rollart.envs.host", "def f():\n    from rollart.cluster import local", "envs may not import cluster"),
    ("rollart.envs.host", "from rollart.model import Network", "envs may not import model"),
    ("rollart.rewards.http", "from rollart.envs import host", "rewards may not import envs"),
    ("rollart.weights.shm", "from rollart.train import single", "weights may not import train"),
    ("rollart.train.single", "from rollart.weights import shm", "train may not import weights"),
    ("rollart.cluster.local", "from rollart.engines import embedded", "cluster may not import engines"),
    (
        "rollart.cluster.local",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rollart.control.proxy import Proxy",
        "cluster may not import control",
    ),
    ("rollart.sim", "from .. import control", "sim may not import control"),
    ("rollart.sim.engine", "from rollart.engines import embedded", "sim may not import engines"),
    ("rollart.sim.engine", "from rollart.policy import swap", "sim may not import policy"),
    ("rollart.model", "from rollart.train import losses", "model may not import train"),
    ("rollart.models.tiny", "from rollart.engines import embedded", "models may not import engines"),
    ("rollart.tasks.frozen_lake", "from rollart.envs import host", "tasks may not import envs"),
    ("rollart.summary", "from rollart.config.job import Job", "summary may not import config"),
    ("rollart.summary", "import torch", "summary may not import torch"),
    ("rollart.audit", "from rollart.summary import Summary", "audit may not import summary"),
    ("rollart.audit", "import transformers", "audit may not import transformers"),
    ("rollart.explain", "from rollart.policy.affinity import Affinity", "explain may not import policy"),
    ("rollart.run", "from rollart.cli import main", "run may not import cli"),
    ("rollart.worlds", "import ray", "only rollart.cluster may import ray"),
    ("rollart.cli", "from rollart.run import run_job", "cli may not import run"),
    ("rollart.commands.runs", "def f():\n    import torch", "commands may not import torch"),
    ("rollart.commands.runs", "from rollart.run import run_job", "commands may import run inside a function only"),
    (
        "rollart.commands.runs",
        "class A:\n    from rollart.config.job import Job",
        "commands may import config inside a function only",
    ),
    ("rollart.extra", "", "has no row in MAY_IMPORT"),
]


@pytest.mark.parametrize(("module", "source", "message"), BROKEN)
def test_a_broken_rule_is_found(module: str, source: str, message: str) -> None:
    found = broken_rules(module, source, is_package=module == "rollart.sim")
    assert len(found) >= 1
    assert message in found[0]


KEPT = [
    ("rollart.cli", "from rollart import __version__\nfrom rollart.errors import JobError"),
    ("rollart.commands.runs", "def f():\n    from rollart.run import run_job\n    from rollart.sim import fit"),
    (
        "rollart.commands.runs",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rollart.config.job import Job",
    ),
    (
        "rollart.run",
        "from rollart.control import proxy\nfrom rollart.engines import embedded\nimport rollart.sim.clock",
    ),
    ("rollart.control.proxy", "from rollart.policy.routing import choose\nfrom .render import Render\nimport asyncio"),
    ("rollart.policy.mix", "from rollart.types import Task\nfrom . import routing"),
    ("rollart.engines.embedded", "import torch\nfrom rollart.model import Network\nfrom rollart.engines import vllm"),
    ("rollart.train.single", "from rollart.model import Network"),
    ("rollart.cluster.ray", "import ray"),
]


@pytest.mark.parametrize(("module", "source"), KEPT)
def test_a_kept_rule_is_quiet(module: str, source: str) -> None:
    assert broken_rules(module, source) == []


def loaded_after(statement: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter after this statement."""
    code = f"{statement}\nimport sys\nprint(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_job_file_needs_nothing_heavy() -> None:
    loaded = loaded_after("import rollart.config.load")
    assert "rollart" in loaded
    assert loaded & HEAVY == set()
