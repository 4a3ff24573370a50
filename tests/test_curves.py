"""The drawing of rewards: every task of every run has its line and its dots, where they belong."""

import json
import re
from pathlib import Path

from scripts.curves import draw, read


def test_lines_are_means_of_the_last_steps_and_dots_the_held_out_plays(tmp_path: Path) -> None:
    run = tmp_path / "a<b"
    run.mkdir()
    rows = [{"step": step, "time_s": 10.0 * step, "lake/reward/mean": reward} for step, reward in enumerate((0, 1, 1))]
    rows[2]["lake/reward/scored"] = 3
    rows.append({"step": 3, "time_s": 40.0, "reward/mean": 0.5})  # without the task
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    played = [("sampled", 0.25), ("greedy", 0.9)]
    events = [{"e": "eval", "t": 20.0, "name": "eval2", "task": "lake", "play": p, "reward": r} for p, r in played]
    (run / "events.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [{"e": "run", "t": 0}, *events]))
    by_time, by_step = read(run, "seconds", 2), read(run, "steps", 2)
    assert by_time.trained == {"lake": [(0.0, 0.0), (10.0, 0.5), (20.0, 1.0)]}
    assert read(run, "steps", 3).trained["lake"][-1] == (3, 0.8), "of one, one and three trajectories"
    assert by_step.trained == {"lake": [(1, 0.0), (2, 0.5), (3, 1.0)]}
    assert (by_time.held_out, by_step.held_out) == ({"lake": [(20.0, 0.25)]}, {"lake": [(2.0, 0.25)]})
    drawing = draw([by_time, by_time], "seconds")
    assert len(re.findall("<polyline", drawing)) == len(re.findall("<circle", drawing)) == 2
    assert "a&lt;b" in drawing
    assert "42.0,214.0 192.0,119.0 342.0,24.0" in drawing, "from the lower left to the upper right"
