"""Repair a real Python package in which one line was changed: list, read, search, edit, run a failing test, submit.

A problem is one mutation of one file of a package that is installed (`repair_mutations.py`), and a test of the
package's own that fails because of it. The catalogue `code_repair.json` says which mutations are noticed by which test;
a file is played only where it is, by its hash, the one that the catalogue was made from. The reward is 1 where all
tests of the file pass, the hidden ones too, in a new sandbox: the edits that were said are made again there, and the
package is found nowhere else. Give it `isolation: sandbox`: environments run what the model wrote. (In any other, each
run of tests gets a sandbox of its own.) An environment's sandbox has the installed package, which a model could find.

Levels: 1 and 2, the failing test names the function, in a file of up to 300 lines or a longer one; 3 and 4, it does
not.
"""

import functools
import hashlib
import json
import random
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from rollart.chat import spoken
from rollart.errors import JobError
from rollart.tasks.api import Environment, Episode, TaskSet, observe
from rollart.tasks.repair_mutations import Mutation, mutations
from rollart.tasks.repair_project import Ran, package_files, run_tests, site_of, test_file, write_project
from rollart.types import Observation, Payload, Task

CATALOGUE = Path(__file__).with_name("code_repair.json")
MAX_ACTIONS = 50
MAX_SHOWN = 1500
"""Characters of one observation."""
READ_LINES = 40
"""That one `read` shows where it does not say how many."""
MAX_HITS = 20

Hint = Literal["none", "file", "function"]

PROMPT = """One line of the Python package {package} was changed, and its test {test} fails. Repair it.{hint}
Each answer is one action:
list FOLDER
read FILE FROM TO
search TEXT
edit FILE FROM TO
(these lines are replaced by the lines that follow)
test
submit
"""


class Problem(TypedDict):
    """What a task's payload is: one changed line of a file, and its tests."""

    file: str
    tests: str
    mutation: int
    """Its number among those of the file."""
    test: str
    """The first that it fails."""
    level: int


class Workspace:
    """The package's files as the model has them. Nothing is on disk here."""

    def __init__(self, payload: Payload) -> None:
        self.package = str(payload["file"]).partition("/")[0]
        self.changed = {str(payload["file"]): mutated(payload)}
        self.edited = False

    def act(self, action: str) -> str:
        """What an action on the files leads to; the caller knows of `test` and `submit`."""
        first, _, rest = action.strip().partition("\n")
        match first.split():
            case ["list", *folder]:
                return self._listed("/".join(folder).strip("/") or self.package)
            case ["read", name, *span]:
                return self._read(name, span)
            case ["search", *words] if words:
                return self._found(" ".join(words))
            case ["edit", name, *span]:
                return self._edit(name, span, rest)
            case _:
                return "no such action: say list, read, search, edit, test or submit"

    def _text(self, name: str) -> str | None:
        if name in self.changed:
            return self.changed[name]
        file = package_files(self.package).get(name) if name.endswith(".py") else None
        return None if file is None else file.data.decode()

    def _listed(self, folder: str) -> str:
        files = [name for name in package_files(self.package) if name.endswith(".py")]
        below = [name.removeprefix(f"{folder}/").partition("/") for name in files if name.startswith(f"{folder}/")]
        names = dict.fromkeys(f"{first}{slash}" for first, slash, _ in below)
        return "\n".join(names) if names else f"no folder {folder}"

    def _read(self, name: str, span: Sequence[str]) -> str:
        text = self._text(name)
        if text is None:
            return f"no file {name}"
        if not all(word.isdigit() for word in span):
            return "say: read FILE FROM TO"
        lines = text.splitlines()
        start = max(1, int(span[0])) if span else 1
        end = int(span[1]) if len(span) > 1 else start + READ_LINES - 1
        return "\n".join(f"{number} {lines[number - 1]}" for number in range(start, min(end, len(lines)) + 1)) or (
            f"{name} has {len(lines)} lines"
        )

    def _found(self, words: str) -> str:
        hits: list[str] = []
        for name in package_files(self.package):
            text = self._text(name) if name.endswith(".py") else None
            if text is not None and words in text:
                lines = text.splitlines()
                hits += [f"{name} {number} {line}" for number, line in enumerate(lines, 1) if words in line]
            if len(hits) >= MAX_HITS:
                return "\n".join([*hits[:MAX_HITS], "and more"])
        return "\n".join(hits) or "nothing found"

    def _edit(self, name: str, span: Sequence[str], rest: str) -> str:
        text = self._text(name)
        if text is None:
            return f"no file {name}"
        if len(span) not in (1, 2) or not all(word.isdigit() for word in span):
            return "say: edit FILE FROM TO, and the new lines below"
        lines = text.splitlines()
        start, end = int(span[0]), int(span[-1])
        if not 1 <= start <= end <= len(lines):
            return f"{name} has lines 1 to {len(lines)}"
        lines[start - 1 : end] = rest.splitlines()
        self.changed[name] = "\n".join(lines) + "\n"
        self.edited = True
        return "edited"


class Repairing(Environment):
    """One changed line."""

    def __init__(self, payload: Payload, hint: Hint) -> None:
        self._payload = payload
        self._hint = hint
        self._workspace = Workspace(payload)
        self._actions = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def reset(self) -> str:
        package, test = self._workspace.package, str(self._payload["test"])
        hint = "" if self._hint == "none" else f" The line is in {self._payload['file']}"
        hint += f", in {mutation_of(self._payload).function}." if self._hint == "function" else "." if hint else ""
        return PROMPT.format(package=package, test=test, hint=hint)

    def step(self, action: str) -> Observation:
        self._actions += 1
        action = spoken(action)
        match action.split(maxsplit=1):
            case ["submit", *_]:
                return observe(done=True)
            case ["test", *_]:
                said = self._tested()
            case _:
                said = self._workspace.act(action)
        return observe(_short(said) + "\n", done=self._actions >= MAX_ACTIONS)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def _tested(self) -> str:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="repair-")
            lay_out(Path(self._folder.name), self._workspace.package, str(self._payload["tests"]), {})
        project = Path(self._folder.name) / "project"
        for name, text in self._workspace.changed.items():
            (project / name).write_text(text)
        tests = Path(self._folder.name) / "tests" / Path(self._payload["tests"]).name
        ran = run_tests(project, tests, str(self._payload["test"]), package=self._workspace.package)
        return "the test passes" if ran.well else _same_each_time(ran.said, Path(self._folder.name).name)


class CodeRepair(TaskSet):
    """Mutations of installed packages. `level`: of this one only; `package`: of this one only; `hint`: what the first
    message says of the place; `catalogue`: another than our own, as `scripts/repair_catalogue.py` makes them."""

    def __init__(
        self,
        *,
        level: int = 0,
        package: str = "",
        hint: Hint = "none",
        catalogue: str = "",
        seed: int = 0,
        domain: str = "",
    ) -> None:
        super().__init__(seed=seed, domain=domain)
        if level not in range(5):
            raise JobError(f"tasks.args.level: {level} is not a level; give 1 to 4, or 0 for all")
        self._level = level
        self._package = package
        self._hint: Hint = hint
        self._catalogue = Path(catalogue) if catalogue else CATALOGUE
        self._rows: list[Problem] = []

    def prepare(self) -> None:
        self.problems()

    def problems(self) -> list[Problem]:
        """All that can be played here."""
        if not self._rows:
            rows = _catalogue(self._catalogue)
            self._rows = [
                row
                for row in rows
                if self._level in (0, row["level"]) and self._package in ("", row["file"].partition("/")[0])
            ]
            if not self._rows:
                raise JobError(
                    f"tasks.args: no mutation of level {self._level or 'any'} in {self._package or 'any package'} is "
                    f"in {self._catalogue}; give another level or package"
                )
        return self._rows

    def draw(self, rng: random.Random) -> Payload:
        return rng.choice(self.problems())

    def environment(self, task: Task) -> Repairing:
        return Repairing(task.payload, self._hint)

    def cache_key(self, task: Task) -> str:
        return str(task.payload["file"]).partition("/")[0]

    def fill_cache(self, key: str) -> None:
        package_files(key)

    def scripted(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        """See it fail, undo it, submit."""
        if len(observations) == 1:
            return "test"
        if len(observations) > 2:
            return "submit"
        mutation = mutation_of(task.payload)
        return f"edit {task.payload['file']} {mutation.line} {mutation.line}\n{mutation.old}"

    def novice(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        """Looks around."""
        return rng.choice(["test", f"read {task.payload['file']} {rng.randint(1, 50)}", "submit"])


def score(episode: Episode) -> float:
    """1 where all tests pass on what the model left: those that pass on the package as it is."""
    payload = episode.task.payload
    workspace = Workspace(payload)
    for action in (spoken(turn.text) for turn in episode.turns):
        if action.split(maxsplit=1)[:1] == ["edit"]:
            workspace.act(action)
    if not workspace.edited:
        return 0.0
    ran = hidden_tests(workspace.package, str(payload["tests"]), workspace.changed)
    return float(ran.well and ran.passed >= _wanted(workspace.package, str(payload["tests"])))


def hidden_tests(package: str, tests: str, changed: Mapping[str, str]) -> Ran:
    with tempfile.TemporaryDirectory(prefix="repair-") as folder:
        return run_tests(Path(folder) / "project", lay_out(Path(folder), package, tests, changed), package=package)


@functools.cache
def _wanted(package: str, tests: str) -> frozenset[str]:
    """The tests that pass on the package as it is: which are skipped depends on what else is installed."""
    ran = hidden_tests(package, tests, {})
    if not ran.well:
        raise RuntimeError(f"{tests} does not pass on {package} as it is installed: {_short(ran.said)}")
    return ran.passed


def lay_out(folder: Path, package: str, tests: str, changed: Mapping[str, str]) -> Path:
    """The project and, beside it, its tests, for a sandbox to read. Returns the tests' file."""
    folder.chmod(0o755)
    write_project(folder / "project", package, changed)
    file = folder / "tests" / Path(tests).name
    file.parent.mkdir()
    file.write_text(test_file(package, tests))
    return file


def mutation_of(payload: Payload) -> Mutation:
    return _mutations(str(payload["file"]))[payload["mutation"]]


def mutated(payload: Payload) -> str:
    """The file with its mutation."""
    mutation, lines = mutation_of(payload), _source(str(payload["file"])).splitlines()
    lines[mutation.line - 1] = mutation.new
    return "\n".join(lines) + "\n"


def _source(name: str) -> str:
    return (site_of(name.partition("/")[0]) / name).read_text()


@functools.lru_cache(maxsize=64)
def _mutations(name: str) -> list[Mutation]:
    return mutations(_source(name))


@functools.cache
def _catalogue(path: Path) -> list[Problem]:
    """Its rows whose files are those that are installed. Raises JobError where none is."""
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise JobError(f"tasks.args.catalogue: {path} cannot be read ({error}); give one that is there") from None
    rows: list[Problem] = []
    for name, file in body["files"].items():
        package = name.partition("/")[0]
        try:
            site = site_of(package)
            sha = hashlib.sha256((site / name).read_bytes() + (site / file["tests"]).read_bytes()).hexdigest()
        except (JobError, OSError):
            continue
        if sha.startswith(file["sha256"]):
            for number, test, level in file["mutations"]:
                rows.append({"file": name, "tests": file["tests"], "mutation": number, "test": test, "level": level})
    if not rows:
        wanted = " ".join(f"{package}=={version}" for package, version in body["packages"].items())
        raise JobError(f"code_repair: none of its packages is installed as it was: pip install pytest {wanted}")
    return rows


def _same_each_time(said: str, folder: str) -> str:
    """What pytest said, without names, addresses and times of this run."""
    said = re.sub(rf"(\S*/)?{re.escape(folder)}/(project/)?", "", said)
    said = re.sub(r"0x[0-9a-f]{6,}", "0x", said)
    return re.sub(r"\n=+ short test summary info.*", "", said, flags=re.DOTALL)


def _short(text: str) -> str:
    """Its end, where an error stands, where it is too long."""
    return text if len(text) <= MAX_SHOWN else "..." + text[-MAX_SHOWN:]
