"""Finds user code: task sets and reward functions named `module`, `module:name`, `file.py` or `file.py:name`, and
environments of libraries, named `library:name`.

The only place where a string becomes code. Errors are JobError: they name the string and the fix.
"""

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rollart.errors import JobError
from rollart.tasks.api import Episode, Reward, TaskSet, score

RewardFunction = Callable[[Episode], Reward]


SCHEMES = {
    "gymnasium": "Gymnasium",
    "reasoning_gym": "ReasoningGym",
    "gem": "Gem",
    "textarena": "TextArena",
    "verifiers": "Verifiers",
    "openenv": "OpenEnv",
}
"""Libraries of environments: `gem:NAME` is the class there, made with `id=NAME`."""
LIBRARIES = "rollart.tasks.libraries"


def load_task_set(use: str, args: Mapping[str, object] | None = None, *, seed: int = 0, domain: str = "") -> TaskSet:
    """The task set named by a job file's `use`, made with its `args`. `domain` is the task's name in the job (default:
    the file's)."""
    scheme, colon, known = use.partition(":")
    if colon and scheme in SCHEMES:
        maker, domain = getattr(_import(LIBRARIES, use), SCHEMES[scheme]), domain or scheme
        if args and "id" in args:
            raise JobError(f"tasks.args.id: is {known!r} already, in {use}; remove it")
        args = {**(args or {}), "id": known}
    else:
        module, name = _split(use)
        found = _import(module, use)
        domain = domain or found.__name__.rpartition(".")[2]
        maker = _task_set_in(found, use) if not name else _attribute(found, name, use)
    if isinstance(maker, TaskSet):
        if args:
            raise JobError(f"tasks.args: {use} is a task set already, and takes none; name its class, or remove them")
        return maker
    if not callable(maker) or (isinstance(maker, type) and not issubclass(maker, TaskSet)):
        raise JobError(f"tasks.use: {use} is a {type(maker).__name__}, not a TaskSet")
    checked = _checked(maker, args or {}, use)
    try:
        made = maker(seed=seed, domain=domain, **checked)
    except JobError:
        raise
    except (Exception, SystemExit) as error:  # the boundary to user code
        raise JobError(f"tasks.use: {use} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(made, TaskSet):
        raise JobError(f"tasks.use: {use} made a {type(made).__name__}, not a TaskSet")
    return made


def load_reward(use: str) -> RewardFunction:
    """The reward function named `module:function`."""
    return load_function(use, "reward function", "score")


def load_function(use: str, what: str = "function", example: str = "solve") -> Callable[..., Any]:
    """The function, or class, named `module:name`. `what` it is to be, and what it could be called."""
    module, name = _split(use)
    if not name:
        raise JobError(f"{what} {use}: say which, as {module}:{example}")
    function = _attribute(_import(module, use), name, use)
    if not callable(function):
        raise JobError(f"{what} {use} is a {type(function).__name__}, not a {what.split()[-1]}")
    return function  # type: ignore[no-any-return]


def reward_of(use: str) -> str:
    """The reward function that goes with a task set, as `module:function`: `score` in its file, or the default."""
    if use.partition(":")[0] in SCHEMES:
        return f"{score.__module__}:score"
    module, _ = _split(use)
    return f"{module}:score" if hasattr(_import(module, use), "score") else f"{score.__module__}:score"


def code_of(use: str) -> list[Path]:
    """The file of this user code, or the package that it is in; nothing where it cannot be found."""
    module, _ = _split(use)
    if module.endswith(".py"):
        return [Path(module).absolute()]
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(module.partition(".")[0])
        if spec is not None and spec.submodule_search_locations:
            return [Path(place).absolute() for place in spec.submodule_search_locations]
        if spec is not None and spec.origin and Path(spec.origin).is_file():
            return [Path(spec.origin).absolute()]
    return []


def _split(use: str) -> tuple[str, str]:
    module, colon, name = use.rpartition(":")
    return (module, name) if colon and "/" not in name and "\\" not in name else (use, "")


def _import(module: str, use: str) -> ModuleType:
    try:
        return _import_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and not f"{module}.".startswith(f"{error.name}."):
            raise JobError(f"{use} needs the package {error.name}: pip install {error.name}") from error
        libraries = f", or LIBRARY:NAME with one of {', '.join(SCHEMES)}" if module == use.partition(":")[0] else ""
        raise JobError(
            f"{use}: no module {module} was found; give a module or the path of a .py file{libraries}"
        ) from error
    except JobError:
        raise
    except (Exception, SystemExit) as error:  # the boundary to user code: whatever it raises is its author's to read
        raise JobError(f"{use} cannot be imported: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise JobError(f"there is no file {path}; correct the path")
    package = f"rollart_user_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    name = f"{package}.{path.stem}"  # the stem last: it is the default domain
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _task_set_in(module: ModuleType, use: str) -> Any:
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, TaskSet)
        and value.__module__ == module.__name__
        and not value.__abstractmethods__
    ]
    found = [value for value in found if not any(value in other.__bases__ for other in found)]
    if len(found) == 1:
        return found[0]
    if not found and use in SCHEMES:
        raise JobError(f"tasks.use: {use} is a library; say which of its environments, as {use}:NAME (`rollart envs`)")
    if not found:
        raise JobError(f"tasks.use: {use} holds no class that derives from TaskSet and has draw() and environment()")
    names = ", ".join(sorted(value.__name__ for value in found))
    raise JobError(f"tasks.use: {use} holds several task sets ({names}); say which, as {use}:{found[0].__name__}")


def _checked(maker: Callable[..., Any], args: Mapping[str, object], use: str) -> dict[str, object]:
    """The arguments as the maker's annotations have them. Raises JobError that names the argument and the fix."""
    try:
        parameters = dict(inspect.signature(maker, eval_str=True).parameters)
    except (NameError, TypeError, ValueError):  # annotations that cannot be read say nothing
        parameters = dict(inspect.signature(maker).parameters)
    kinds = {parameter.kind for parameter in parameters.values()}
    taken = {
        name: parameter
        for name, parameter in parameters.items()
        if name not in ("seed", "domain") and parameter.kind in (inspect.Parameter.KEYWORD_ONLY, _EITHER_WAY)
    }
    for name in args:
        if name not in taken and (inspect.Parameter.VAR_KEYWORD not in kinds or name in ("seed", "domain")):
            near = difflib.get_close_matches(name, taken, n=1, cutoff=0.5)
            meant = f", did you mean {near[0]!r}?" if near else ""
            instead = f"it takes {', '.join(taken)}" if taken else "it takes no arguments; remove it"
            raise JobError(f"tasks.args.{name}: {use} has no such argument{meant}; {instead}")
    for name, parameter in taken.items():
        if name not in args and parameter.default is inspect.Parameter.empty:
            raise JobError(f"tasks.args.{name}: missing; {use} needs it")
    return {name: _fitting(taken.get(name), name, value) for name, value in args.items()}


_EITHER_WAY = inspect.Parameter.POSITIONAL_OR_KEYWORD


def _fitting(parameter: inspect.Parameter | None, name: str, value: Any) -> Any:
    if parameter is None or parameter.annotation is inspect.Parameter.empty or isinstance(parameter.annotation, str):
        return value
    import pydantic

    try:
        return pydantic.TypeAdapter(parameter.annotation).validate_python(value)
    except pydantic.PydanticSchemaGenerationError:
        return value  # a type of the author's own: theirs to check
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        inside = "".join(f".{part}" for part in wrong["loc"] if isinstance(part, int))
        message = f"{wrong['msg'][0].lower()}{wrong['msg'][1:]}"
        if wrong["type"] == "string_type" and (value is None or isinstance(value, dict)):
            message += " (in YAML, one that begins with # or { is written in quotes)"
        raise JobError(
            f"tasks.args.{name}{inside}: {wrong['input']!r} does not fit: {message}; change it to such a value"
        ) from None


def _attribute(module: ModuleType, name: str, use: str) -> Any:
    if not hasattr(module, name):
        own = [
            one
            for one, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and not one.startswith("_")
        ]
        near = difflib.get_close_matches(name, own, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(own) or 'no function or class of its own'}"
        raise JobError(f"{use}: {module.__name__.rpartition('.')[2]} has no {name}; {hint}")
    return getattr(module, name)
