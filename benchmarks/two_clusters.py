"""One job over two clusters that share nothing but a slow link: `python -m benchmarks.two_clusters --store tcp`.

This machine becomes two (`benchmarks.two_sides`; needs root). Ray's head, the coordinator and the trainer are on one
side, engines and environments on the other; model and tokenizer are on the trainer's side only. The tasks are the
quickstart's, the model is the tiny one, padded. `--cut 20` takes the link away for so long in the middle of the run,
and once more during a push. Prints what the run's own summary says of steps and weights, and what the audit found.
"""

import argparse
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import yaml

from benchmarks.two_sides import OWN, REPOSITORY, TRAINER, TwoSides, missing
from rollart.events import schema
from rollart.events.log import read_events
from rollart.events.schema import Event

RAY_PORT = 6379
MASTER_PORT = 50051
STORES: dict[str, dict[str, Any]] = {
    "mooncake": {"type": "mooncake", "master": f"{TRAINER}:{MASTER_PORT}"},
    "tcp": {"type": "tcp", "address": f"{TRAINER}:7700"},
}
"""`weights` of a job, by the name of the store."""
PATIENT = {
    # A cut of a minute is no lost machine: the head asks each every 3 s, and gives it up after so many misses.
    "RAY_health_check_failure_threshold": "40",
    # Connections outlive it too, at both ends: by default gRPC ends one whose bytes nobody acknowledged for 20 s.
    "RAY_grpc_keepalive_timeout_ms": "180000",
    "RAY_grpc_client_keepalive_timeout_ms": "180000",
    # Both sides are one machine's memory, and others may use it: nobody is killed because it is nearly full.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_register_timeout_seconds": "180",
    # The token, the same on both sides, as docs/ray.md says.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
"""Of every Ray process, on both sides. docs/ray.md says why."""
CLIENT_TTL_S = 120
"""A machine that Mooncake's master has not heard of for so long is lost, and what it held. Its own default is 10 s."""
START_S = 180.0
"""How long Ray may take to start on a side."""
SKIPPED_STEPS = 2
"""Not counted in `step_s`: rollout begins with nothing in flight."""


def padded_model(path: Path, num_bytes: int, warmup_steps: int = 5) -> None:
    """The tiny model with wider layers: more weights, the same answers. The new columns read nothing at first."""
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    from rollart_recipes.tiny import make_tiny, save

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tiny = Path(folder) / "tiny"
        make_tiny(tiny, warmup_steps=warmup_steps)
        narrow: Any = Qwen3ForCausalLM.from_pretrained(str(tiny), local_files_only=True)
        config = narrow.config
        each = 3 * config.hidden_size * config.num_hidden_layers * 4
        config.intermediate_size += max(0, num_bytes - sum(each.nbytes for each in narrow.parameters())) // each
        network: Any = Qwen3ForCausalLM
        wide = network(config)
        small = narrow.state_dict()
        for name, tensor in wide.state_dict().items():
            if name.endswith("down_proj.weight"):
                tensor.zero_()
            tensor[tuple(slice(size) for size in small[name].shape)] = small[name]
        save(wide, path)
        AutoTokenizer.from_pretrained(str(tiny), local_files_only=True).save_pretrained(path)


def job_for(weights: Mapping[str, Any], steps: int, **settings: Any) -> dict[str, Any]:
    """The quickstart's tasks, with engines and environments on the rollout's side."""
    raw: dict[str, Any] = yaml.safe_load((REPOSITORY / "jobs" / "quickstart.yaml").read_text())
    tasks = [{**task, "group_size": 4, "affinity": "rollout"} for task in raw["tasks"]]
    job = {
        **raw,
        "name": "two-clusters",
        "model": {**raw["model"], "path": str(OWN / "model")},
        "tasks": tasks,
        "rollout": {"groups_per_step": 4, "staleness": 2, "zero_variance": "keep"},
        "pools": [
            {"name": "rollout", "resource": "rollout", "engines": {"count": 1, "kv_tokens": 32768, "max_batch": 64}},
            {"name": "environments", "resource": "rollout", "slots": 64, "slots_per_worker": 64, "isolation": "inline"},
            {"name": "train", "resource": "train"},
        ],
        "train": {**raw["train"], "pool": "train", "steps": steps, "lr": 1e-4},
        "weights": {"bucket_mb": 16, **weights},
        "cluster": {"type": "ray", "address": f"{TRAINER}:{RAY_PORT}"},
        "checkpoint": {"every": 5},
        "evaluation": {"every": 0},
    }
    return {**job, **settings}


@contextmanager
def two_clusters(folder: Path, rate_mbit: float, model_bytes: int) -> Iterator[TwoSides]:
    """Both sides with a Ray node each, and the model where the trainer is."""
    with TwoSides(folder, rate_mbit) as sides:
        padded_model(sides.trainer.folder / "model", model_bytes)
        common = ["--disable-usage-stats", "--object-store-memory", "100000000"]
        head = ["--head", f"--port={RAY_PORT}", "--num-cpus=2", "--include-dashboard=false"]
        join = [f"--address={TRAINER}:{RAY_PORT}", "--num-cpus=4"]
        for side, resource, how in ((sides.trainer, "train", head), (sides.rollout, "rollout", join)):
            where = [f"--node-ip-address={side.address}", f'--resources={{"{resource}": 1}}']
            side.run(["ray", "start", *how, *where, *common], START_S, PATIENT)
        yield sides


def weights_for(sides: TwoSides, store: str, model_bytes: int) -> dict[str, Any]:
    """`weights` of the job, with what the store needs started: Mooncake's master is on the trainer's side, its memory,
    for three versions, where the engines are."""
    settings = STORES[store]
    if store == "mooncake":
        where = [f"--rpc_port={MASTER_PORT}", f"--rpc_address={TRAINER}", f"--client_ttl={CLIENT_TTL_S}"]
        sides.trainer.start(["mooncake_master", *where], sides.trainer.folder / "master.log")
        settings = {**settings, "segment_mb": 3 * model_bytes // 1_000_000 + 64}
    return settings


class Run:
    """A job that runs on both sides; its events as they come."""

    def __init__(self, sides: TwoSides, job: Mapping[str, Any], name: str) -> None:
        self.out = sides.trainer.folder / name
        self.sides = sides
        file = sides.trainer.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(dict(job)))
        command = ["rollart", "train", str(OWN / file.name), "--out", str(OWN / name), "--json"]
        self.log = sides.trainer.folder / f"{name}.log"
        self._process = sides.trainer.start(command, self.log, PATIENT)

    def events(self) -> list[Event]:
        path = self.out / "events.jsonl"
        return list(read_events(path)) if path.exists() else []

    def wait_for(self, moment: Callable[[Event], bool], timeout_s: float, after: int = -1) -> Event:
        """The first such event after the event of this number."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            for event in self.events():
                if event.n > after and moment(event):
                    return event
            if self._process.poll() is not None:
                raise RuntimeError(f"the run ended before it was seen: {self._tail()}")
            time.sleep(0.2)
        raise TimeoutError(f"not seen within {timeout_s:g} s: {self._tail()}")

    def end(self, timeout_s: float) -> dict[str, Any]:
        """Its summary. Raises RuntimeError where the job or the audit of its events failed."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            raise TimeoutError(f"the run was not over after {timeout_s:g} s: {self._tail()}") from None
        if code:
            raise RuntimeError(f"the run ended with {code}: {self._tail()}")
        self.sides.trainer.run(["rollart", "audit", str(OWN / self.out.name)], 120)
        summary: dict[str, Any] = orjson.loads((self.out / "summary.json").read_bytes())
        return summary

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


def step_end(number: int) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, schema.StepEnd) and event.version >= number


def is_push(event: Event) -> bool:
    return isinstance(event, schema.Push)


def play(run: Run, steps: int, cut_s: float) -> dict[str, Any]:
    """Wait for its end, with two cuts on the way where `cut_s` is not 0. What was seen."""
    cuts: list[dict[str, float]] = []
    if cut_s:
        for moment in (step_end(max(2, steps // 3)), is_push):
            last = run.events()[-1].n if run.events() else -1
            run.wait_for(moment, 900, last)
            before = len([event for event in run.events() if isinstance(event, schema.StepEnd)])
            with run.sides.cut():
                time.sleep(cut_s)
            events = run.events()
            cuts.append({"step": before, "events_when_back": len(events)})
            run.wait_for(step_end(before + 2), 900)
    summary = run.end(1800)
    return {"cuts": len(cuts), **figures(run, summary)}


def figures(run: Run, summary: Mapping[str, Any]) -> dict[str, Any]:
    events = run.events()
    ends = [event for event in events if isinstance(event, schema.StepEnd)]
    gaps = [after.t - before.t for before, after in zip(ends[SKIPPED_STEPS:], ends[SKIPPED_STEPS + 1 :], strict=False)]
    return {
        "state": summary["state"],
        "steps": summary["steps"],
        "step_s": round(statistics.median(gaps), 2) if gaps else None,
        "train_s": round(statistics.median(event.train_s for event in ends), 2),
        "weights": summary["weights"],
        "engines_lost": sum(isinstance(event, schema.EngineDown) for event in events),
        "trainers_lost": sum(isinstance(event, schema.TrainerDown) for event in events),
        "groups": {key: summary["groups"][key] for key in ("lost", "trained_twice")},
        "max_steps": summary["staleness"]["max_steps"],
    }


def measure(folder: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """A run at each rate, one after the other, on the same two clusters."""
    rows: list[dict[str, Any]] = []
    model_bytes = given.model_mb * 1_000_000
    with two_clusters(folder, given.rate[0], model_bytes) as sides:
        weights = weights_for(sides, given.store, model_bytes)
        for number, rate in enumerate(given.rate):
            sides.shape(rate)
            before = sides.sent_bytes()
            run = Run(sides, job_for(weights, given.steps), f"run{number}")
            row = play(run, given.steps, given.cut)
            row |= {"rate_mbit": rate, "link_bytes": sides.sent_bytes() - before}
            row["longer_of_both_s"] = round(max(row["train_s"], row["weights"]["arrival_s"]), 2)
            rows.append(row)
            print(f"{rate:g} Mbit/s: {row}", file=sys.stderr, flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="tcp", choices=sorted(STORES))
    parser.add_argument(
        "--rate", type=float, nargs="+", default=[400.0], help="of the link, in Mbit/s; a run for each (default: 400)"
    )
    parser.add_argument("--model-mb", type=int, default=250, help="of the padded model (default: 250)")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cut", type=float, default=0.0, help="seconds without the link, twice (default: 0, none)")
    parser.add_argument("--keep", type=Path, help="leave the run directories here")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if why := missing():
        print(f"two clusters on one machine: {why}", file=sys.stderr)
        return 2
    folder = given.keep or Path(tempfile.mkdtemp(prefix="rollart-two-"))
    try:
        found = {"store": given.store, "runs": measure(folder, given)}
    finally:
        if given.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    if given.json:
        sys.stdout.buffer.write(orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    else:
        for number, row in enumerate(found["runs"]):
            print("" if number else f"store {given.store}")
            for name, value in row.items():
                print(f"{name:>16}  {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
