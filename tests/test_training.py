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
        ({"train": {"type": "fsdp2"}}, "train.type"),
        ({"pools": [{"name": "cpu", "engines": {"type": "vllm"}, "slots": 8}]}, "weights.type"),
        ({"pools": [{"name": "cpu", "engines": {"type": "sglang"}, "slots": 8}]}, "weights.type"),
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


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"weights": {"type": "files"}},
        {"weights": {"type": "files"}, "pools": [{"name": "cpu", "engines": {"type": "vllm"}, "slots": 8}]},
        {"weights": {"type": "files"}, "pools": [{"name": "cpu", "engines": {"type": "sglang"}, "slots": 8}]},
    ],
)
def test_what_train_has_is_let_through(change: dict[str, object]) -> None:
    refuse_what_is_not_there(build_job({**JOB, **change}))


@pytest.mark.parametrize(
    ("engines", "text"),
    [
        ({"type": "vllm", "device": "cuda:0"}, r"^engines\.device: only embedded engines read it; remove it"),
        ({"type": "sglang", "keep_kv": True}, r"^engines\.keep_kv: only embedded"),
        ({"python": "/usr/bin/python3"}, r"^engines\.python: only vllm or sglang"),
        ({"type": "vllm", "url": "http://h:1", "count": 2}, r"^engines\.url: names one server; set count to 1"),
        ({"type": "sglang", "split": {}}, r"^engines\.split: only vllm engines read it"),
        ({"type": "vllm", "url": "http://h:1", "args": ["-x"]}, r"^engines\.args: has no effect with url"),
    ],
)
def test_a_setting_that_its_kind_of_engine_does_not_read_is_refused(engines: dict[str, object], text: str) -> None:
    with pytest.raises(JobError, match=text):
        build_job({**JOB, "pools": [{"name": "cpu", "engines": engines, "slots": 8}]})


def test_a_path_for_weights_that_are_no_files_is_refused() -> None:
    with pytest.raises(JobError, match=r"^weights\.path: has no effect with type shm; set weights\.type to files"):
        build_job({**JOB, "weights": {"path": "/mnt/weights"}})
