"""What is looked at before a run: exit code 2, one line for each thing that is wrong, and nothing was written."""

import errno
import json
import math
import re
import shutil
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
import yaml

from rollart.cli import main
from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.errors import JobError
from rollart.launch.checks import RUN_BYTES, problems, refuse_long_contexts, refuse_mixtures_on_servers, refuse_start
from rollart.launch.rundir import alone
from tests.real.harness import job

POSITIONS = 1024
"""Of the tiny model."""


def check_real(checked: Job) -> None:
    refuse_start(checked, Path("runs") / checked.name)


def long(model: Path, context_tokens: int, **engines: Any) -> dict[str, Any]:
    pool = {"name": "cpu", "engines": engines, "slots": 4}
    return job(model, pools=[pool]) | {"model": {"path": str(model), "context_tokens": context_tokens}}


def test_a_context_that_model_and_cache_can_hold_is_let_through(model: Path) -> None:
    check_real(build_job(long(model, POSITIONS, kv_tokens=POSITIONS)))


@pytest.mark.parametrize("engines", [{}, {"type": "vllm"}, {"type": "sglang"}])
def test_a_context_longer_than_the_model_is_refused(engines: dict[str, Any], model: Path) -> None:
    raw = long(model, POSITIONS + 1, **engines) | {"weights": {"type": "files"}}
    with pytest.raises(
        JobError, match=r"^model\.context_tokens: 1025 is more than the 1024 positions .*=1024 or less$"
    ):
        check_real(build_job(raw))


def test_the_positions_of_a_text_model_inside_another_are_found(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "nested")
    config = json.loads((model / "config.json").read_text())
    del config["max_position_embeddings"]
    (tmp_path / "nested" / "config.json").write_text(
        json.dumps(config | {"text_config": {"max_position_embeddings": 64}})
    )
    with pytest.raises(JobError, match="128 is more than the 64 positions"):
        check_real(build_job(long(tmp_path / "nested", 128)))


def test_a_context_longer_than_the_cache_is_refused(model: Path) -> None:
    text = r"^model\.context_tokens: 512 is more than pools\.cpu\.engines\.kv_tokens 511, .* or raise kv_tokens$"
    with pytest.raises(JobError, match=text):
        check_real(build_job(long(model, 512, kv_tokens=511)))


@pytest.mark.parametrize(
    "left_out", [["tokenizer.json", "tokenizer_config.json"], ["chat_template.jinja"]], ids=["tokenizer", "template"]
)
def test_a_model_without_its_tokenizer_leaves_no_run_directory(
    left_out: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "model", ignore=lambda *_: left_out)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job(tmp_path / "model")))
    assert main(["train", str(tmp_path / "job.yaml"), "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("rollart: model.path: the ")
    assert not (tmp_path / "run").exists()


def test_a_reference_that_is_no_model_is_refused(model: Path, tmp_path: Path) -> None:
    train = {"kl_coef": 0.1, "reference": str(tmp_path)}
    with pytest.raises(JobError, match=r"^train\.reference: .* has no config\.json"):
        check_real(build_job(job(model, train=train)))
    check_real(build_job(job(model, train={**train, "reference": str(model)})))


# --- all of it, as a user sees it ---------------------------------------------------------------------------------

BAD_TASK = """
import os
from rollart.tasks.api import Environment, TaskSet, observe

class Room(Environment):
    def reset(self):
        WHAT
    def step(self, action):
        return observe(reward=1.0, done=True)

class Rooms(TaskSet):
    def draw(self, rng):
        return {"number": rng.randrange(10**9)}
    def environment(self, task):
        return Room()
"""


def lines_of(
    raw: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str = "check", *options: str
) -> list[str]:
    """What a command says of a job that it refuses; nothing is left behind."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "job.yaml").write_text(yaml.safe_dump(raw))
    capsys.readouterr()
    assert main([command, str(folder / "job.yaml"), *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [path.name for path in folder.iterdir()] == ["job.yaml"]
    return [line for line in shown.err.splitlines() if ": warning: " not in line]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def task_of(tmp_path: Path, what: str) -> list[dict[str, Any]]:
    (tmp_path / "room.py").write_text(BAD_TASK.replace("WHAT", what))
    return [{"name": "room", "use": str(tmp_path / "room.py"), "max_tokens": 4}]


def test_a_job_that_can_be_started_is_said_to_be_fine(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "job.yaml").write_text(yaml.safe_dump(job(model)))
    assert main(["check", str(here / "job.yaml")]) == 0
    assert "simulator alone" not in capsys.readouterr().out
    assert list((here / "here").iterdir()) == []


def test_every_problem_has_a_line_of_its_own(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = job(
        here / "no-model",
        tasks=[
            {"name": name, "use": use, "max_tokens": 4}
            for name, use in (("a", "no_such_module"), ("b", ""), ("c", "none.py"))
        ],
        train={"cores": [4096]},
    )
    said = lines_of(raw, here, capsys)
    keys = ["train.cores", "tasks.0.use", "tasks.1.use", "tasks.2.use", "model.path"]
    assert [line.split(": ")[1] for line in said] == keys
    assert "no module no_such_module was found" in said[1]


def other_model(model: Path, to: Path, **config: Any) -> Path:
    shutil.copytree(model, to)
    (to / "config.json").write_text(json.dumps(config))
    return to


def test_a_model_that_is_no_causal_one_is_refused(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = lines_of(job(other_model(model, here / "t5", model_type="t5")), here, capsys, "train")
    assert any(
        line.startswith("rollart: model.path: ") and "is a t5, no causal language model" in line for line in said
    )


def test_a_config_that_cannot_be_read_is_one_line(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = other_model(model, here / "odd", model_type="gpt2", n_embd="many")
    (said,) = lines_of(job(odd), here, capsys, "train")
    assert said.startswith(f"rollart: model.path: {odd}/config.json: ")


@pytest.mark.parametrize(("kind", "why"), [("gemma2", "softcap"), ("bloom", "off by"), ("deepseek_v3", "keys")])
def test_an_architecture_that_would_be_computed_wrongly_is_refused(
    kind: str, why: str, model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = here / kind
    shutil.copytree(model, other)
    (other / "config.json").write_text(json.dumps({"model_type": kind, "hidden_size": 512, "num_attention_heads": 8}))
    said = lines_of(job(other), here, capsys)
    assert any(line.startswith(f"rollart: model.path: {other}: {kind}: ") and why in line for line in said)


@pytest.mark.parametrize("window", [512, 128])
def test_a_sliding_window_is_taken_also_where_the_context_reaches_beyond_it(
    window: int, model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = other_model(model, here / "mistral", model_type="mistral", sliding_window=window)
    said = lines_of(long(other, 256), here, capsys)
    assert not any("mistral: cannot be run" in line for line in said)


GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256, "n_ctx": 256, "vocab_size": 512}


def test_gpt2_is_taken(model: Path, here: Path) -> None:
    """Its config has other names for all sizes."""
    gpt2 = other_model(model, here / "gpt2", model_type="gpt2", architectures=["GPT2LMHeadModel"], **GPT2)
    assert problems(build_job(job(gpt2)), here / "run") == []
    with pytest.raises(JobError, match="257 is more than the 256 positions"):
        refuse_long_contexts(build_job(long(gpt2, 257)))


def test_a_model_whose_layers_the_sharded_trainer_does_not_find_is_refused(model: Path, here: Path) -> None:
    gpt2 = other_model(model, here / "gpt2", model_type="gpt2", architectures=["GPT2LMHeadModel"], **GPT2)
    raw = build_job(job(gpt2, train={"type": "fsdp2", "pool": "cpu"}))
    (said,) = problems(raw, here / "run")
    assert said.startswith(f"model.path: {gpt2}: gpt2: its layers are not where train.type=fsdp2 looks for them")
    assert problems(raw, here / "run", trains=False) == [], "nothing is sharded where nothing is trained"
    assert problems(build_job(job(model, train={"type": "fsdp2", "pool": "cpu"})), here / "run") == []


def test_a_reference_that_would_be_computed_wrongly_or_cannot_be_sharded_is_refused(model: Path, here: Path) -> None:
    gpt2 = other_model(model, here / "gpt2", model_type="gpt2", architectures=["GPT2LMHeadModel"], **GPT2)
    bloom = other_model(model, here / "bloom", model_type="bloom", hidden_size=512, num_attention_heads=8)
    bare = here / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    for kind, reference, why in [
        ("fsdp2", gpt2, f"train.reference: {gpt2}: gpt2: its layers are not where train.type=fsdp2 looks for them"),
        ("fsdp2", bloom, f"train.reference: {bloom}: bloom: "),
        ("single", bloom, f"train.reference: {bloom}: bloom: "),
        ("single", bare, f"train.reference: {bare} holds no weights"),
    ]:
        train = {"type": kind, "pool": "cpu", "kl_coef": 0.1, "reference": str(reference)}
        (said,) = problems(build_job(job(model, train=train)), here / "run")
        assert said.startswith(why)
        assert problems(build_job(job(model, train=train)), here / "run", trains=False) == [], "it is not needed"
    train = {"type": "single", "pool": "cpu", "kl_coef": 0.1, "reference": str(gpt2)}
    assert problems(build_job(job(model, train=train)), here / "run") == []


def test_a_mixture_with_other_names_is_refused_on_servers(model: Path, here: Path) -> None:
    sizes = {"num_layers": 2, "hidden_size": 32, "expert_ffn_hidden_size": 8, "n_routed_experts": 4}
    longcat = other_model(model, here / "longcat", model_type="longcat_flash", **sizes)
    with pytest.raises(JobError, match="is a mixture of experts"):
        refuse_mixtures_on_servers(build_job(long(longcat, 128, type="sglang")))


def test_a_model_without_weights_is_refused(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(model, here / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    (said,) = lines_of(job(here / "bare"), here, capsys)
    assert "holds no weights" in said


@pytest.mark.parametrize(
    ("content", "command"),
    [("pointer", "check"), ("empty", "train"), ("cut off", "eval"), ("head cut off", "check")],
)
def test_a_weight_file_that_is_not_whole_is_refused(
    content: str, command: str, model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a clone without git-lfs, or a download that was broken off, leaves it."""
    shutil.copytree(model, here / "broken")
    file = here / "broken" / "model.safetensors"
    whole = file.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
    file.write_bytes({"pointer": pointer, "empty": b"", "cut off": whole[:-1], "head cut off": whole[:100]}[content])
    (said,) = lines_of(job(here / "broken"), here, capsys, command)
    assert said.startswith(f"rollart: model.path: {file} is not a whole safetensors file (")
    assert said.endswith("; fetch it again (git lfs pull)")


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("return 'word ' * 2000", "tasks.0: the first prompt of 'room' has"),
        ("os._exit(3)", "tasks.0: 'room' cannot begin an episode (reset: "),
        ("raise KeyError('map')", "tasks.0: 'room' cannot begin an episode (reset: KeyError: 'map'"),
    ],
    ids=["too long", "dies", "raises"],
)
def test_a_task_whose_episodes_cannot_begin_is_refused(
    what: str, says: str, model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (said,) = lines_of(job(model, tasks=task_of(here, what)), here, capsys, "train")
    assert said.startswith(f"rollart: {says}")


LEAVING = """
import os, sys
from rollart.tasks.api import TaskSet
IMPORT
class Rooms(TaskSet):
    def __init__(self, **named):
        MAKE
        super().__init__(**named)
    def draw(self, rng):
        DRAW
    def environment(self, task):
        raise ValueError
"""


@pytest.mark.parametrize(
    ("place", "what", "says"),
    [
        ("IMPORT", "sys.exit(0)", "tasks.0.use: {use} cannot be imported: SystemExit: 0"),
        ("MAKE", "sys.exit(0)", "tasks.0.use: {use} cannot be made: SystemExit: 0"),
        ("DRAW", "sys.exit(0)", "tasks.0: 'room' cannot begin an episode (task(0): SystemExit: 0)"),
        ("IMPORT", "os._exit(0)", "tasks.0.use: {use}: loading it ended its process (exit code 0), which"),
        ("MAKE", "os.abort()", "tasks.0.use: {use}: loading it ended its process (signal SIGABRT), which"),
        ("DRAW", "os._exit(3)", "tasks.0.use: {use}: task(0) ended its process (exit code 3), which"),
    ],
)
def test_a_task_set_that_leaves_its_process_is_refused(
    place: str, what: str, says: str, model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use = here / "room.py"
    code = LEAVING.replace(place, what)
    use.write_text(code.replace("IMPORT", "").replace("MAKE", "pass").replace("DRAW", "return {}"))
    tasks = [{"name": "room", "use": str(use), "max_tokens": 4}]
    (said,) = lines_of(job(model, tasks=tasks), here, capsys, "train")
    assert said.startswith(f"rollart: {says.format(use=use)}")


HELD_OUT = """
import os
from rollart.tasks.api import Environment, TaskSet, observe

class Room(Environment):
    def reset(self):
        return "go"
    def step(self, action):
        return observe(reward=1.0, done=True)

class Rooms(TaskSet):
    def draw(self, rng):
        return {"number": rng.randrange(10**9)}
    def held_out(self, index):
        WHAT
    def environment(self, task):
        return Room()
"""


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("raise KeyError('map')", "tasks.0: 'room' cannot begin an episode (held_out(0): KeyError: 'map')"),
        ("return 7", "tasks.0: 'room' cannot begin an episode (held_out(0): returned a int, not a Task)"),
        ("os._exit(3)", "tasks.0.use: {use}: held_out(0) ended its process (exit code 3), which"),
    ],
)
def test_a_task_set_without_held_out_tasks_is_refused_where_they_are_played(
    what: str, says: str, model: Path, here: Path
) -> None:
    use = here / "room.py"
    use.write_text(HELD_OUT.replace("WHAT", what))
    tasks = [{"name": "room", "use": str(use), "max_tokens": 4}]
    assert problems(build_job(job(model, tasks=tasks)), here / "run") == []
    played = [problems(build_job(job(model, tasks=tasks)), here / "run", trains=False)]
    for evaluation in ({"first": True}, {"every": 4}):
        played.append(problems(build_job(job(model, tasks=tasks, evaluation=evaluation)), here / "run"))
    for found in played:
        (said,) = found
        assert said.startswith(says.format(use=use))


def test_environments_in_this_process_see_its_variables(
    model: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those in a process of their own see what the job names."""
    monkeypatch.setenv("ROOM_NUMBER", "7")
    tasks, cpu = task_of(here, "return os.environ['ROOM_NUMBER']"), job(model)["pools"][0]
    for isolation, count in (("inline", 0), ("process", 1)):
        pools = [cpu, {"name": "rooms", "slots": 3, "isolation": isolation}]
        assert len(problems(build_job(job(model, tasks=tasks, pools=pools)), here / "run")) == count, isolation


def test_a_role_that_the_template_refuses_is_told(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strict = here / "strict"
    shutil.copytree(model, strict)
    template = strict / "chat_template.jinja"
    template.write_text(
        "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endfor %}"
        + template.read_text()
    )
    tasks = task_of(here, "return observe('x', role='tool')")
    (said,) = lines_of(job(strict, tasks=tasks), here, capsys)
    assert "the chat template refuses messages in the roles tool" in said


def test_an_environment_that_fails_now_and_then_is_let_through(model: Path, here: Path) -> None:
    """What one environment does is its own affair; and one that takes its time is not waited for."""
    flag = here / "tried"
    once = (
        f"flag = {str(flag)!r}\n        if not os.path.exists(flag): open(flag, 'w'); os._exit(1)\n        return 'go'"
    )
    check_real(build_job(job(model, tasks=task_of(here, once))))


def test_a_slow_environment_is_not_waited_for(model: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollart.launch.checks.RESET_S", 0.01)
    check_real(build_job(job(model, tasks=task_of(here, "import time; time.sleep(3600)"))))


def test_an_address_where_nobody_answers_is_refused(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        (said,) = lines_of(job(model, rewards={"type": "http", "url": url}), here, capsys, "train")
    assert said.startswith(f"rollart: rewards.url: {url} cannot be reached (")


def test_an_address_that_is_none_is_refused(model: Path, here: Path) -> None:
    (said,) = problems(build_job(job(model, rewards={"type": "http", "url": "http://[bad"})), here / "run")
    assert said.startswith("rewards.url: http://[bad cannot be reached (Invalid IPv6 URL); ")


def test_an_address_where_somebody_answers_will_do(model: Path, here: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # answers 501 to everything
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        check_real(build_job(job(model, rewards={"type": "http", "url": f"http://127.0.0.1:{server.server_port}"})))
    finally:
        server.shutdown()
        server.server_close()


def test_a_servers_interpreter_that_is_not_there_is_refused(
    model: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(**engines: Any) -> list[str]:
        raw = long(model, 128, type="vllm", **engines) | {"weights": {"type": "files"}}
        return problems(build_job(raw), here / "run")

    gone = str(here / "no-venv" / "bin" / "python")
    assert said(python=gone) == [
        f"pools.cpu.engines.python: {gone} is not a program that can be run here; name the interpreter that has vllm, "
        "or install it there"
    ]
    assert said(python=sys.executable) == said() == []
    monkeypatch.setenv("ROLLART_VLLM_PYTHON", gone)
    (line,) = said()
    assert line.startswith(f"pools.cpu.engines.python: {gone} (from ROLLART_VLLM_PYTHON) is not a program")
    assert said(python=sys.executable) == said(url="http://127.0.0.1:1") == []


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:2"])
def test_a_device_that_is_not_there_is_refused(
    device: str, model: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollart.cluster.machine.gpus", lambda: ["H200", "H200"])
    (said,) = lines_of(job(model, train={"device": device}), here, capsys)
    assert said.startswith(
        f"rollart: train.device: {device!r} is not a device" if device != "cuda:2" else "rollart: train."
    )


def test_the_trainers_device_is_asked_for_where_there_is_a_trainer(
    model: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollart.cluster.machine.gpus", list)
    checked = build_job(job(model, train={"pool": "cpu", "device": "cuda"}))
    assert [line.split(".")[0] for line in problems(checked, here / "run")] == ["pools: the job cannot be placed"]
    assert problems(checked, here / "run", trains=False) == []


@pytest.mark.parametrize("command", ["train", "eval", "sim", "check"])
@pytest.mark.parametrize(
    ("out", "says"), [("taken", "exists"), ("file/run", "Not a directory"), ("/proc/run", "cannot be made")]
)
def test_a_place_that_cannot_be_written_to_is_one_line(
    command: str, out: str, says: str, model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "taken").mkdir()
    (here / "file").touch()
    (said,) = lines_of(job(model), here, capsys, command, "--out", str(here / out))
    assert said.startswith(f"rollart: --out: {here / out} ")
    assert says in said


def test_a_disk_without_room_is_refused(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage
    monkeypatch.setattr("shutil.disk_usage", lambda path: real(path)._replace(free=60_000_000))
    (said,) = lines_of(job(model), here, capsys, "train", "--out", str(here / "run"))
    assert said.startswith(f"rollart: --out: {here} has 0.06 GB free, and this job writes at least 0.")
    assert not (here / "run").exists()


def test_a_place_for_weights_that_cannot_be_written_to_is_one_line(model: Path, here: Path) -> None:
    (here / "file").touch()
    raw = job(model, weights={"type": "files", "path": str(here / "file" / "weights")})
    (said,) = problems(build_job(raw), here / "run")
    assert said.startswith(f"weights.path: {here / 'file' / 'weights'} cannot be made in {here / 'file'} (Not a direc")


def test_a_run_directory_that_cannot_be_locked_is_one_line(here: Path) -> None:
    with pytest.raises(JobError, match=r"^--resume: .* cannot be written to \(No such file"), alone(here / "gone"):
        pass


def test_check_looks_at_a_run_directory_that_is_named(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run may be given another than the default one, which is no reason to refuse the job."""
    real = shutil.disk_usage
    monkeypatch.setattr("shutil.disk_usage", lambda path: real(path)._replace(free=60_000_000))
    raw = job(model)
    (here / "job.yaml").write_text(yaml.safe_dump(raw))
    assert main(["check", str(here / "job.yaml")]) == 0
    (said,) = lines_of(raw, here, capsys, "check", "--out", str(here / "run"))
    assert said.startswith(f"rollart: --out: {here} has 0.06 GB free")


@pytest.mark.parametrize("weights", ["shm", "tcp", "files"])
def test_shared_memory_without_room_for_two_versions_is_refused(
    weights: str, model: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage
    full = {"free": 1000}
    monkeypatch.setattr("shutil.disk_usage", lambda path: real(path)._replace(**(full if "shm" in str(path) else {})))
    found = problems(build_job(job(model, weights={"type": weights})), here / "run")
    if weights == "files":
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith("weights.type: /dev/shm has 0.00 GB free, and this job writes at least 0.0")


def test_room_for_weights_in_the_run_directory_is_counted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = sum(math.prod(one.shape) for one in safetensors.numpy.load_file(model / "model.safetensors").values())
    real = shutil.disk_usage
    free = RUN_BYTES + (3 * 12 + 2 * 4) * params
    monkeypatch.setattr("shutil.disk_usage", lambda path: real(path)._replace(free=free))
    raw = build_job(job(model, weights={"type": "files"}, checkpoint={"keep": 2}))
    assert problems(raw, Path("runs/new")) == []
    free -= 1
    assert [line.split(":")[0] for line in problems(raw, Path("runs/new"))] == ["--out"]


def test_room_for_checkpoints_is_counted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = 16 + sum(
        math.prod(tensor.shape) for tensor in safetensors.numpy.load_file(model / "model.safetensors").values()
    )
    free = RUN_BYTES + 12 * 3 * params
    real = shutil.disk_usage
    monkeypatch.setattr("shutil.disk_usage", lambda path: real(path)._replace(free=free))
    check_real(build_job(job(model)))
    with pytest.raises(JobError, match=r"^--out: .* or lower checkpoint\.keep$"):
        check_real(build_job(job(model, checkpoint={"keep": 3})))


def test_a_disk_that_fills_up_later_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "events.jsonl")

    monkeypatch.setattr("rollart.launch.books.EventLog", full)
    (here / "job.yaml").write_text(yaml.safe_dump(job(here)))
    assert main(["sim", str(here / "job.yaml")]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("rollart: stopped: events.jsonl: No space left")


@pytest.mark.parametrize(
    ("weights", "engines", "train", "said"),
    [
        (
            "nccl",
            {"type": "vllm"},
            {},
            r"weights\.type: nccl is for embedded engines, and pools\.0\.engines\.type is vllm",
        ),
        ("nccl", {"device": "cuda:0"}, {}, r"nccl is between devices of one kind; pools\.0\.engines\.device is cuda:0"),
        ("nccl", {"device": "cuda:0"}, {"device": "cuda:0"}, r"pools\.0\.engines shares cuda:0 with the trainer"),
        (
            "nccl",
            {"device": "cuda:1", "stage": "device"},
            {"device": "cuda:0"},
            r"stage: with weights\.type nccl versions",
        ),
        ("nccl", {"prefill": {}}, {}, r"nccl gives each GPU one copy, and with pools\.0\.engines\.prefill two of"),
        (
            "cuda_ipc",
            {"device": "cuda:1"},
            {"device": "cuda:0"},
            r"cuda_ipc is for one GPU; pools\.0\.engines\.device is",
        ),
    ],
)
def test_weights_that_go_from_device_to_device_are_refused_where_they_cannot(
    weights: str, engines: dict[str, Any], train: dict[str, Any], said: str, model: Path
) -> None:
    raw = job(model, weights={"type": weights}, train={"pool": "cpu", "steps": 1, **train})
    raw["pools"] = [{"name": "cpu", "engines": engines}, {"name": "environments", "slots": 3}]
    assert any(re.search(said, problem) for problem in problems(build_job(raw), None))
