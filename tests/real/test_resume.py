"""A real run goes on with other settings: as printed, after a kill, and after its end."""

import json
import os
import shlex
import signal
from pathlib import Path

import pytest

from rollart.events import schema
from tests.real.harness import Run, job, running


def rates(run: Run) -> list[float]:
    rows = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    return [row["actor/lr"] for row in rows]


@pytest.mark.slow
def test_a_run_goes_on_with_other_settings_again_and_again(model: Path, tmp_path: Path) -> None:
    raw = job(model, train={"pool": "cpu", "steps": 4, "lr": 1e-3}, checkpoint={"every": 100})
    with running(tmp_path, raw) as run:
        run.step(2)
        assert run.process is not None
        os.kill(run.process.pid, signal.SIGKILL)
        run.wait()
        run.nobody_is_left()
        run.start("--resume", str(run.out), "train.lr=2e-3", "train.steps=1000", "pools.environments.slots=2")
        run.until(lambda events: any(isinstance(event, schema.Changed) for event in events), "the change")
        first = next(event for event in run.events() if isinstance(event, schema.Changed)).step
        assert first >= 2, "the steps whose batches were written are replayed"
        run.step(first + 1)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait() == 130, run.said
        run.nothing_remains()
        printed = run.said.rpartition("rollart: to go on: rollart train ")[2].splitlines()[0]
        done = run.summary()["steps"]
        run.start(*shlex.split(printed), f"train.steps={done + 1}", "train.lr=3e-3")
        assert run.wait() == 0, run.said
        assert rates(run) == pytest.approx([1e-3] * first + [2e-3] * (done - first) + [3e-3])
        run.ended_well(done + 1)
        run.start("--resume", str(run.out), f"train.steps={done + 3}")
        assert run.wait() == 0, run.said
        run.ended_well(done + 3)
        run.start("--resume", str(run.out), "seed=7")
        assert run.wait() == 2, run.said
        assert "seed: 0 -> 7" in run.said
        assert len(list(run.out.glob("job-until-*.yaml"))) == 3
