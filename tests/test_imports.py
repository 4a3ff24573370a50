"""Who may import whom: DESIGN.md section 4 as a table, checked on the source of every module under rollart/.

Imports are read with `ast`, those inside functions and under TYPE_CHECKING included. A module without a row in
`MAY_IMPORT` fails, so a new one is placed on purpose.
"""

import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

SHARED = frozenset({"types", "ports", "errors", "append", "causes", "chat", "events", "hardware", "config"})

MAY_IMPORT: dict[str, frozenset[str]] = {
    "": frozenset(),
    "types": frozenset(),
    "causes": frozenset(),
    "chat": frozenset({"types"}),
    "ports": frozenset({"types"}),
    "errors": frozenset({"types"}),
    "append": frozenset({"errors"}),
    "events": frozenset({"types", "errors", "append"}),
    "hardware": frozenset({"types"}),
    "shapes": frozenset({"types", "errors", "hardware"}),
    "config": frozenset({"types", "errors", "hardware", "shapes"}),
    "policy": frozenset({"types", "hardware"}),
    "control": SHARED | {"policy"},
    "workers": SHARED,
    "model": SHARED,
    "tasks": SHARED | {"workers"},
    "cluster": SHARED | {"workers"},
    "engines": SHARED | {"model", "workers"},  # servers are started as workers are
    "train": SHARED | {"model", "workers"},  # ranks are workers, and their shares cross to them
    "store": SHARED | {"model", "workers"},  # the journal's values are encoded as those that cross processes
    "envs": SHARED | {"tasks", "workers"},  # user code is found and run through `tasks`
    "rewards": SHARED | {"tasks", "workers"},
    "gateway": SHARED | {"workers"},
    "records": SHARED,
    "sim": SHARED,
    "report": SHARED | {"records"},
    "launch": SHARED
    | {"policy", "control", "workers", "cluster", "model", "engines", "train", "store", "envs", "rewards", "tasks"}
    | {"gateway", "records", "sim", "report", "shapes"},
    "cli": frozenset({"errors", "config", "events", "policy", "cluster", "sim"})
    | {"launch", "report", "records", "tasks", "rewards"},
}
"""By first name below `rollart` ("" is rollart/__init__.py): what it may import. A package may import itself."""

AT_TOP: dict[str, frozenset[str]] = dict.fromkeys(
    ("rollart.cli", "rollart.cli.words", "rollart.cli.output"), frozenset({"errors"})
)
"""Modules that may import only these at module level, and the rest of their row inside functions: every command loads
them, `rollart --help` too. A command's own module is imported when it runs."""

LIGHT = SHARED | {"", "policy", "control", "workers", "records", "report", "cli"}
HEAVY = frozenset({"torch", "transformers", "ray", "vllm"})
"""No LIGHT module imports these, not even inside a function."""

ONLY_IN = {"ray": "cluster"}
"""A library that one package keeps to itself."""

JSONS_EDGE = frozenset(
    {
        "rollart.config.load",
        "rollart.config.paths",
        "rollart.config.settings",
        "rollart.engines.http",
        "rollart.engines.launch",
        "rollart.engines.sglang",
        "rollart.engines.vllm",
        "rollart.gateway.openai",
        "rollart.launch.checks",
        "rollart.launch.plan",
        "rollart.launch.resume",
        "rollart.launch.trials",
        "rollart.config.shapes",
        "rollart.model.adapters",
        "rollart.model.reduced",
        "rollart.sim.fit",
        "rollart.store.nccl",
        "rollart.train.checkpoints",
    }
)
"""Modules that read JSON or YAML of many shapes, and may call that `ParsedJson`: job files and profiles, models'
config.json, servers' answers, a store's messages. It is spelled out in rollart/types.py only."""

OTHERS_PRIVATE = frozenset({"_modules", "_attn_implementation", "_private", "_exit", "_getframe"})
NAMED_TUPLES = frozenset({"_asdict", "_replace", "_fields", "_make"})
"""What tests may use though it begins with an underscore: libraries' own, and what is public all the same."""

DEEPEST_CHAIN = 12
"""Modules of ours that import one another, each at its top, from the command line down."""


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
        elif module in AT_TOP and not item.deferred and target not in AT_TOP[module]:
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
    ("rollart.engines.vllm", "from rollart.store import shm", "engines may not import store"),
    ("rollart.envs.host", "def f():\n    from rollart.cluster import local", "envs may not import cluster"),
    ("rollart.envs.host", "from rollart.model.network import Network", "envs may not import model"),
    ("rollart.rewards.http", "from rollart.envs import host", "rewards may not import envs"),
    ("rollart.store.shm", "from rollart.train import single", "store may not import train"),
    ("rollart.train.single", "from rollart.store import shm", "train may not import store"),
    ("rollart.cluster.local", "from rollart.engines import embedded", "cluster may not import engines"),
    (
        "rollart.cluster.local",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rollart.control.proxy import Proxy",
        "cluster may not import control",
    ),
    ("rollart.sim", "from .. import control", "sim may not import control"),
    ("rollart.sim.engine", "from rollart.engines import embedded", "sim may not import engines"),
    ("rollart.sim.engine", "from rollart.policy import swap", "sim may not import policy"),
    ("rollart.model.network", "from rollart.train import losses", "model may not import train"),
    ("rollart.tasks.frozen_lake", "from rollart.envs import host", "tasks may not import envs"),
    ("rollart.report.summary", "from rollart.launch.driver import drive", "report may not import launch"),
    ("rollart.report.summary", "import torch", "report may not import torch"),
    ("rollart.report.audit", "import transformers", "report may not import transformers"),
    ("rollart.report.explain", "from rollart.policy.affinity import Affinity", "report may not import policy"),
    ("rollart.launch.driver", "from rollart.cli import main", "launch may not import cli"),
    ("rollart.launch.real", "import ray", "only rollart.cluster may import ray"),
    ("rollart.cli", "from rollart.launch.simulation import simulate", "cli may import launch inside a function only"),
    ("rollart.cli.runs", "def f():\n    import torch", "cli may not import torch"),
    (
        "rollart.cli.words",
        "from rollart.launch.simulation import simulate",
        "cli may import launch inside a function only",
    ),
    (
        "rollart.cli.words",
        "class A:\n    from rollart.config.job import Job",
        "cli may import config inside a function only",
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
    (
        "rollart.cli.runs",
        "def f():\n    from rollart.launch.simulation import simulate\n    from rollart.sim import fit",
    ),
    (
        "rollart.cli.runs",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rollart.config.job import Job",
    ),
    (
        "rollart.launch.simulation",
        "from rollart.control import proxy\nfrom rollart.engines import embedded\nimport rollart.sim.clock",
    ),
    ("rollart.control.proxy", "from rollart.policy.routing import choose\nfrom .render import Render\nimport asyncio"),
    ("rollart.policy.mix", "from rollart.types import Task\nfrom . import routing"),
    (
        "rollart.engines.embedded.engine",
        "import torch\nfrom rollart.model.network import Network\nfrom rollart.engines import vllm",
    ),
    ("rollart.train.single", "from rollart.model.network import Network"),
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


def untyped_objects(module: str, source: str) -> list[str]:
    """Where this module has objects of any shape and is not at JSON's edge, one sentence each."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Subscript(
                value=ast.Name(id="dict" | "Mapping" | "MutableMapping" | "Dict"),
                slice=ast.Tuple(elts=[ast.Name(id="str"), ast.Name(id="Any")]),
            ) if module != "rollart.types":
                found.append(f"{module} line {node.lineno}: {ast.unparse(node)}; give it a type, or say JsonObject")
            case ast.alias(name="ParsedJson") if module not in JSONS_EDGE:
                found.append(f"{module} line {node.lineno}: ParsedJson, and it is not in JSONS_EDGE; give it a type")
    return found


@pytest.mark.parametrize(("module", "path"), [pytest.param(*found, id=found[0]) for found in modules()])
def test_objects_have_types(module: str, path: Path) -> None:
    assert untyped_objects(module, path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "count"),
    [
        ("rollart.store.host", "def f() -> dict[str, Any]: ...", 1),
        ("rollart.store.host", "def f(given: list[Mapping[str, Any]] | None) -> None: ...", 1),
        ("rollart.config.load", "Plain = dict[str, Any]", 1),
        ("rollart.store.host", "from rollart.types import Json, ParsedJson", 1),
        ("rollart.config.load", "from rollart.types import ParsedJson", 0),
        ("rollart.store.host", "from rollart.types import JsonObject\ndef f() -> dict[str, object]: ...", 0),
    ],
)
def test_an_untyped_object_is_found(module: str, source: str, count: int) -> None:
    assert len(untyped_objects(module, source)) == count


def test_each_edge_is_one() -> None:
    sources = {module: path.read_text() for module, path in modules()}
    assert [module for module in sorted(JSONS_EDGE) if "ParsedJson" not in sources.get(module, "")] == []


def is_private(name: str) -> bool:
    return name.startswith("_") and name[1:2].isalpha() and name not in OTHERS_PRIVATE | NAMED_TUPLES


def private_reads(source: str) -> list[str]:
    """Where a test looks at what is private to something else, one sentence each."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if is_private(name):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("rollart"):
                found += [f"line {node.lineno}: imports {one.name}" for one in names if is_private(one.name)]
            case ast.Call(args=[_, ast.Constant(value=str(name)), *_]) if is_private(name):
                found.append(f"line {node.lineno}: sets {name}")
            case ast.Constant(value=str(text)) if text.startswith("rollart.") and is_private(text.rpartition(".")[2]):
                found.append(f"line {node.lineno}: {text}")
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: path.stem)
def test_tests_see_what_is_public(path: Path) -> None:
    """What a thing does, or what it has a public name for: else a change of how it is done breaks its tests."""
    assert private_reads(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("assert engine._calls == {}", 1),
        ("from rollart.launch.training import _drive, train", 1),
        ("monkeypatch.setattr(engine, '_calls', {})", 1),
        ("monkeypatch.setattr('rollart.rewards.function._services', [])", 1),
        ("class Fake:\n    def f(self) -> int:\n        return self._calls", 0),
        ("row._asdict()", 0),
        ("engine.calls", 0),
    ],
)
def test_a_private_read_is_found(source: str, count: int) -> None:
    assert len(private_reads(source)) == count


def chain_from(module: str, imported: dict[str, list[str]], known: dict[str, list[str]]) -> list[str]:
    """The longest chain of imports that begins with this module."""
    if module not in known:
        known[module] = [module]  # a cycle, which Python would refuse too, ends here
        below = [chain_from(target, imported, known) for target in imported[module]]
        known[module] = [module, *max(below, key=len, default=[])]
    return known[module]


def test_no_chain_of_imports_is_deep() -> None:
    found = dict(modules())
    imported: dict[str, list[str]] = {}
    for module, path in found.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        names = [item.name for item in imports_in(ast.parse(path.read_text()), package) if not item.deferred]
        targets = {name if name in found else name.rpartition(".")[0] for name in names}
        imported[module] = sorted(target for target in targets & found.keys() if target not in ("rollart", module))
    known: dict[str, list[str]] = {}
    longest = max((chain_from(module, imported, known) for module in imported), key=len)
    assert len(longest) <= DEEPEST_CHAIN, " -> ".join(longest)


def test_at_the_top_are_few_modules() -> None:
    assert len(list((ROOT / "rollart").glob("*.py"))) <= 8


def reached_from(start: str) -> set[str]:
    """Every module of ours that may be loaded once this one is, imports inside functions included."""
    found = dict(modules())
    reached = [start]
    for module in reached:
        path = found[module]
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for item in imports_in(ast.parse(path.read_text()), package):
            target = item.name if item.name in found else item.name.rpartition(".")[0]
            if target in found and target not in reached:
                reached.append(target)
    return set(reached)


@pytest.mark.parametrize("start", ["rollart.launch.training", "rollart.launch.worker"])
def test_nothing_of_a_real_run_can_import_the_simulator(start: str) -> None:
    reached = reached_from(start)
    assert "rollart.config.job" in reached
    assert [name for name in reached if name.startswith("rollart.sim")] == []


def test_nothing_of_a_simulated_run_can_import_a_trainer_or_an_engine() -> None:
    reached = reached_from("rollart.launch.simulation")
    assert "rollart.sim.engine" in reached
    assert [name for name in reached if name.startswith(("rollart.train", "rollart.engines", "rollart.model"))] == []


def rollart_modules_after(work: str) -> set[str]:
    """Ours, and torch, in sys.modules of a fresh interpreter that has done this."""
    code = (
        f"{work}\nimport sys\nprint(*[n for n in sys.modules if n.startswith(('rollart', 'torch'))], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines()[-1].split())


def test_a_real_run_loads_nothing_of_the_simulator() -> None:
    loaded = rollart_modules_after("import rollart.launch.training, rollart.launch.worker, rollart.envs.process")
    assert "rollart.control.coordinator" in loaded
    assert [name for name in loaded if name.startswith("rollart.sim")] == []


def test_a_simulated_run_loads_no_trainer_and_no_engine() -> None:
    run = "from rollart.cli import main; main(['sim', 'jobs/rollart.yaml', 'train.steps=2', '--json', '--out', {!r}])"
    with tempfile.TemporaryDirectory() as folder:
        loaded = rollart_modules_after(run.format(f"{folder}/run"))
    assert "rollart.sim.engine" in loaded
    heavy = ("rollart.train", "rollart.engines", "rollart.model", "torch")
    assert [name for name in loaded if name.startswith(heavy)] == []
