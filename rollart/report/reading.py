"""Trajectories for people: a listing, and one of them turn by turn, in the terminal. Played episodes look the same
wherever they come from: a run directory, `rollart eval`, or `rollart task check`.

What models and environments said is shown as it is, except control characters: a terminal would obey them.
"""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollart.records.reader import Head, ReadTrajectory, ReadTurn
from rollart.types import Observation, Task

CHARACTERS = 2_000
"""Shown of one message, unless `--full` is given."""
STYLES = {"assistant": "green", "system": "magenta", "tool": "cyan"}
"""By role; others are plain."""


def show_listing(heads: Sequence[Head], found: int, *, dropped: int, first_is_gone: bool) -> None:
    console = Console()
    table = Table(title=f"{len(heads)} of {found} trajectories", title_justify="left", box=None, pad_edge=False)
    for name in ("trajectory", "task", "status", "reward", "turns", "tokens", "versions"):
        table.add_column(name, no_wrap=True)
    table.add_column("trained", no_wrap=True, overflow="ellipsis")
    for head in heads:
        cells = (
            head.id + (f" (life {head.life})" if head.life else ""),
            head.task,
            head.status,
            "" if head.reward is None else f"{head.reward:.4g}",
            str(head.turns),
            str(head.tokens),
            _versions(head.born, head.newest),
            " ".join(visible(_short_fate(head)).split()),
        )
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    if dropped:
        console.print(f"{dropped} finished trajectories could not be kept")
    if first_is_gone:
        console.print("the oldest files are gone: trajectories.total_mb bounds what is kept")


def show_trajectory(trajectory: ReadTrajectory, *, full: bool = False) -> None:
    """Head, turns, and what the environment said last."""
    console = Console(highlight=False, soft_wrap=True)
    head = trajectory.head
    parts = ", ".join(f"{name} {value:.4g}" for name, value in head.parts.items())
    reward = "no reward" if head.reward is None else f"reward {head.reward:.4g}" + (f" ({parts})" if parts else "")
    console.print(Text(f"{head.id}  {head.task}  {head.status}  {visible(reward)}", style="bold"))
    if _fate(head):
        console.print(Text(visible(_fate(head))))
    if head.times:
        console.print(Text(_times(head)))
    for number, turn in enumerate(trajectory.turns):
        console.print(Text(f"--- turn {number}{_where(turn)}", style="dim"))
        if turn.fresh and number:
            console.print(Text("(a new prompt: what was said before is not in it)", style="dim"))
        for message in turn.shown:
            _say(console, message.role, message.content, full=full)
        if not turn.shown and len(turn.context):
            console.print(Text(f"({len(turn.context)} tokens of prompt)", style="dim"))
        _say(console, "assistant", turn.text, full=full)
        if turn.reward:
            console.print(Text(f"reward {turn.reward:.4g}", style="dim"))
    if trajectory.left:
        console.print(Text("--- after the last answer", style="dim"))
    for message in trajectory.left:
        _say(console, message.role, message.content, full=full)


def episode(
    task: Task,
    observations: Sequence[Observation],
    actions: Sequence[str],
    *,
    who: str,
    reward: float | None,
    parts: Mapping[str, float],
) -> ReadTrajectory:
    """An episode played without a model, by `who`, to be shown like one that was kept. It may have broken off."""
    after = [*observations[1:], *[Observation()] * (len(actions) + 1 - len(observations))]
    turns = [
        ReadTurn(shown=before.messages, text=action, reward=then.reward)
        for before, action, then in zip(observations, actions, after, strict=False)
    ]
    last = observations[-1] if len(observations) > len(actions) else Observation()
    return ReadTrajectory(
        head=Head(
            id=who,
            group=who,
            task=task.id,
            domain=task.domain,
            status="done" if last.done else "truncated" if last.truncated else "broken off",
            reward=reward,
            parts=parts,
            turns=len(turns),
            fate="",
        ),
        turns=tuple(turns),
        left=last.messages,
    )


def visible(text: str) -> str:
    """Without characters that a terminal obeys: they are written as escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _say(console: Console, role: str, content: str, *, full: bool) -> None:
    style = STYLES.get(role, "")
    text = visible(content if full else content[:CHARACTERS])
    text = text.rstrip("\n")
    said = Text(f"[{role}]" + ("\n" if "\n" in text else " "), style=f"bold {style}".strip())  # maps stay in shape
    said.append(text, style=style)
    console.print(said)
    if not full and len(content) > CHARACTERS:
        console.print(Text(f"... {len(content) - CHARACTERS:,} more characters (--full shows them)", style="dim"))


def _where(turn: ReadTurn) -> str:
    """Of one turn: engine, versions, tokens and times, where they are known."""
    if not turn.engine:
        return ""
    total = float(turn.logprobs.sum())
    mean = total / max(1, len(turn.logprobs))
    versions = _versions(turn.versions[0], turn.versions[-1]) if len(turn.versions) else "?"
    return (
        f": {turn.engine} (pool {turn.pool}), version {versions}, {len(turn.tokens)} tokens ({turn.finish}), "
        f"log-probability {total:.2f}, {mean:.2f} a token; waited {turn.wait_s:.2f} s, "
        f"generated {turn.generate_s:.2f} s, environment {turn.env_s:.2f} s"
    )


def _times(head: Head) -> str:
    times = head.times
    took_s = times["ended_s"] - times["started_s"]
    known = [
        ("opening", times["open_s"]),
        ("reset", times["reset_s"]),
        ("waiting for engines", times["wait_s"]),
        ("generating", times["generate_s"]),
        ("environment", times["env_s"]),
        ("waiting for a reward slot", times["queue_s"]),
        ("reward", times["reward_s"]),
    ]
    return (
        f"{head.tokens} tokens in {head.turns} turns, versions {_versions(head.born, head.newest)}; "
        f"from {times['started_s']:.2f} s, for {took_s:.2f} s: "
        + ", ".join(f"{name} {seconds:.2f}" for name, seconds in known)
    )


def _short_fate(head: Head) -> str:
    """For one cell of a table."""
    said = f"step {head.step}, {head.advantage:+.2f}" if head.fate == "trained" else f"no: {head.fate}"
    return f"{said}: {head.reason}" if head.reason else said


def _fate(head: Head) -> str:
    life = f", in life {head.life} of the run" if head.life else ""
    match head.fate:
        case "trained":
            said = f"trained on in step {head.step}, advantage {head.advantage:+.3f}"
            said += "" if head.advantage else " (no gradient)"
        case "eval":
            said = "held-out, not trained on"
        case "unused":
            said = "not trained on: its group was trained without it"
        case "restart":
            said = "not trained on: lost with a restart of the run"
        case "open":
            said = "not trained on (yet): its group is open"
        case "":
            said = ""
        case how:
            said = f"not trained on: its group ended as {how}"
    reason = f": {head.reason}" if head.reason else ""
    return f"{said}{life}{reason}"


def _versions(first: int | None, last: int | None) -> str:
    if first is None:
        return "none"
    return str(first) if first == last else f"{first} to {last}"
