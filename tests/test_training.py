"""`rollart train` refuses what it would otherwise ignore, before anything starts."""

import pytest

from rollart.config import build_job
from rollart.errors import JobError
from rollart.worlds import refuse_what_is_not_there

JOB = {
    "name": "real",
    "tasks": [{"name": "lake", "use": "rollart.tasks.frozen_lake"}],
    "pools": [{"name": "cpu", "engines": {"count": 1}}, {"name": "environments", "slots": 8}],
}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"cluster": {"type": "ray"}}, "cluster.type"),
        ({"weights": {"type": "mooncake"}}, "weights.type"),
        ({"train": {"type": "single", "gpus": 2}}, "train.gpus"),
        ({"pools": [{"name": "cpu", "engines": {"type": "vllm"}, "slots": 8}]}, "pools.cpu.engines.type"),
        (
            {
                "pools": [
                    {"name": "cpu", "engines": {"count": 1}, "slots": 8, "isolation": "inline"},
                    {"name": "environments", "slots": 8},
                ]
            },
            "pools",
        ),
    ],
)
def test_a_setting_that_train_does_not_have_yet_is_refused_by_its_key(change: dict[str, object], key: str) -> None:
    with pytest.raises(JobError, match=f"^{key}: "):
        refuse_what_is_not_there(build_job({**JOB, **change}))


def test_what_train_has_is_let_through() -> None:
    refuse_what_is_not_there(build_job(JOB))
    refuse_what_is_not_there(build_job({**JOB, "train": {"type": "fsdp2", "gpus": 2}}))
