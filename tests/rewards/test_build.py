"""Folders that deploy reward functions; the one for Lambda runs under AWS's own runtime and emulator."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from rollart.config.settings import RewardSettings
from rollart.errors import JobError, RewardError
from rollart.rewards.aws import event_of
from rollart.rewards.build import PORT, build
from rollart.rewards.episodes import episode_of
from rollart.rewards.function import lambda_handler
from rollart.rewards.gzipped import LARGEST_BYTES, deflate
from rollart.rewards.http import HttpRewards, https, unreachable
from tests.contracts.reward_functions import FUNCTION, closing, decode, run, trajectory

SAM, RUNTIME = "aws-sam-cli==1.170.0", "awslambdaric==4.2.2"
EMULATOR = "samcli/local/rapid/aws-lambda-rie-x86_64"
TOKEN = "a secret of the tests"


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Credentials that open nothing."""
    for name, value in (("REGION", "eu-north-1"), ("ACCESS_KEY_ID", "AKIAEXAMPLE"), ("SECRET_ACCESS_KEY", "example")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    return monkeypatch


@pytest.mark.parametrize("target", ["container", "lambda", "fc"])
def test_a_folder_holds_the_functions_and_what_they_import(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLART_REWARD_TOKEN", TOKEN)
    out = tmp_path / "made"
    after = build(target, FUNCTION, out, install=False)
    assert any(str(out) in line for line in after)
    assert (out / "functions" / "functions.py").read_text() == Path(FUNCTION.rpartition(":")[0]).read_text()
    assert (out / "rollart" / "rewards" / "function.py").exists()
    assert not (out / "rollart" / "train").exists(), "only what is imported"
    assert "msgspec==" in (out / "requirements.txt").read_text()
    written = [path for path in out.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in path.read_bytes() for path in written), "no secret goes along"
    if target == "lambda":
        with zipfile.ZipFile(out / "function.zip") as archive:
            assert "functions/functions.py" in archive.namelist()
    # it works from there, with nothing of this checkout on the path
    command = "from rollart.rewards.function import handle, load_reward; load_reward('functions/functions.py:score')"
    subprocess.run([sys.executable, "-P", "-c", command], cwd=out, env={"PYTHONPATH": str(out)}, check=True)


def test_what_cannot_be_built_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(JobError, match="exists"):
        build("container", FUNCTION, tmp_path / "there")
    with pytest.raises(JobError, match="no module"):
        build("container", "no.such.module:score", tmp_path / "new")
    with pytest.raises(JobError, match=r"two files are called functions\.py"):
        build("container", f"a={FUNCTION},b={FUNCTION}", tmp_path / "new")
    with pytest.raises(JobError, match="pip could not fetch"):
        build("lambda", FUNCTION, tmp_path / "new", python="2.7")
    assert not (tmp_path / "new").exists()


def test_lambda_needs_to_know_who_calls_and_where(aws: pytest.MonkeyPatch) -> None:
    assert unreachable("lambda://grade") is None
    aws.delenv("AWS_REGION")
    aws.delenv("AWS_DEFAULT_REGION", raising=False)
    assert "set AWS_REGION" in (unreachable("lambda://grade") or "")
    assert https("fc://a.cn-hangzhou.fcapp.run/x") == "https://a.cn-hangzhou.fcapp.run/x"


def test_a_lambda_event_may_come_encoded_and_may_be_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollart.rewards.function.services", [])
    monkeypatch.setenv("ROLLART_REWARD_FUNCTION", FUNCTION)
    monkeypatch.delenv("ROLLART_REWARD_TOKEN", raising=False)
    for event in ({"body": "bm8=", "isBase64Encoded": True}, {"body": "{"}, {}):
        answer = lambda_handler(event, None)
        assert (answer["statusCode"], "not an episode" in answer["body"]) == (400, True)


def test_a_lambda_event_may_be_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollart.rewards.function.services", [])
    monkeypatch.setenv("ROLLART_REWARD_FUNCTION", FUNCTION)
    monkeypatch.delenv("ROLLART_REWARD_TOKEN", raising=False)
    body = json.dumps(episode_of(trajectory("sum"), decode).to_json()).encode()
    for sent, status in ((deflate(body), 200), (deflate(bytes(LARGEST_BYTES + 1)), 413), (body, 400)):
        answer = lambda_handler(json.loads(event_of(sent, {"Content-Encoding": "gzip"})), None)
        assert (answer["statusCode"], answer["headers"]["Accept-Encoding"]) == (status, "gzip")
    assert lambda_handler(json.loads(event_of(body, {})), None)["statusCode"] == 200


@pytest.mark.slow
@pytest.mark.parametrize("target", ["container", "fc"])
def test_the_program_of_a_folder_takes_compressed_bodies(target: str, tmp_path: Path) -> None:
    """As its Dockerfile or its bootstrap starts it, with the packages of this machine."""
    out = tmp_path / "made"
    build(target, FUNCTION, out, install=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "ROLLART_REWARD_TOKEN": TOKEN}
    if target == "fc":
        program = (out / "bootstrap").read_text().replace(f"--port {PORT}", f"--port {port}")
        (out / "bootstrap").write_text(program)
        command = ["./bootstrap"]
    else:
        lines = (out / "Dockerfile").read_text().splitlines()
        command = ["sh", "-c", next(line.removeprefix("CMD ") for line in lines if line.startswith("CMD "))]
        environment |= {"PORT": str(port), "PYTHONPATH": str(out)}
        environment |= {"ROLLART_REWARD_FUNCTION": "functions/functions.py:score"}
    with subprocess.Popen(
        command, cwd=out, env=environment, start_new_session=True, stderr=subprocess.DEVNULL
    ) as server:
        url = f"http://127.0.0.1:{port}"
        deadline_s = time.monotonic() + 60
        while (why := unreachable(url)) is not None:
            assert time.monotonic() < deadline_s, why
            time.sleep(0.1)
        body = json.dumps(episode_of(trajectory("sum"), decode).to_json()).encode()
        coded = {"Content-Encoding": "gzip", "Authorization": f"Bearer {TOKEN}"}
        answer = httpx.post(url, content=deflate(body), headers=coded, trust_env=False, timeout=60)
        assert (answer.status_code, answer.json()["reward"]) == (200, 0.75)
        many = httpx.post(url, content=deflate(bytes(LARGEST_BYTES + 1)), headers=coded, trust_env=False, timeout=60)
        assert many.status_code == 413
        os.killpg(server.pid, signal.SIGKILL)


def _fetched(package: str, folder: Path, *how: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *how, "--quiet", package]
    subprocess.run(command, cwd=folder, check=True)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The folder under AWS's runtime, in its emulator: the endpoint."""
    folder = tmp_path_factory.mktemp("lambda")
    _fetched(SAM, folder, "download", "--no-deps")
    _fetched(RUNTIME, folder, "install", "--target", "runtime")
    with zipfile.ZipFile(next(folder.glob("aws_sam_cli*.whl"))) as wheel:
        emulator = Path(wheel.extract(EMULATOR, folder))
    emulator.chmod(0o755)
    build("lambda", FUNCTION, folder / "made")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{folder / 'made'}:{folder / 'runtime'}",
        "ROLLART_REWARD_FUNCTION": "functions/functions.py:score",
        "ROLLART_REWARD_TOKEN": TOKEN,
    }
    command = [str(emulator), "--runtime-interface-emulator-address", f"127.0.0.1:{port}"]
    command += [sys.executable, "-m", "awslambdaric", "rollart.rewards.function.lambda_handler"]
    with subprocess.Popen(
        command, cwd=folder / "made", env=environment, start_new_session=True, stderr=subprocess.DEVNULL
    ) as server:
        deadline_s = time.monotonic() + 30
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}", trust_env=False)
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        os.killpg(server.pid, signal.SIGKILL)


@pytest.mark.slow
def test_lambda_runs_it(emulated: str, aws: pytest.MonkeyPatch) -> None:
    aws.setenv("AWS_ENDPOINT_URL_LAMBDA", emulated)
    events: list[bytes] = []

    def noted(body: bytes, headers: Mapping[str, str]) -> bytes:
        events.append(event_of(body, headers))
        return events[-1]

    aws.setattr("rollart.rewards.http.event_of", noted)

    def rewards(token: str) -> HttpRewards:
        # one call at a time: so it is on Lambda too, in one process
        return HttpRewards(RewardSettings(type="http", url="lambda://function", concurrency=1), decode, token)

    async def work() -> None:
        async with closing(rewards(TOKEN)) as backend:
            first = await backend.score(trajectory("sum"))
            assert (first.value, first.cold_start_s > 0) == (0.75, True)
            many = await asyncio.gather(*(backend.score(trajectory("sum")) for _ in range(20)))
            assert {(score.value, score.cold_start_s) for score in many} == {(0.75, 0.0)}
            assert dict((await backend.score(trajectory("parts"))).parts) == {"right": 1.0, "short": 0.25}
            long = await backend.score(trajectory("sum", text="word " * 4000))
            assert (long.value, long.calls, b"isBase64Encoded" in events[-1]) == (0.75, 1, True), "it went compressed"
            with pytest.raises(RewardError, match="no reference answer") as raised:
                await backend.score(trajectory("raise"))
            assert raised.value.retryable
            with pytest.raises(RewardError, match="finite number") as raised:
                await backend.score(trajectory("text"))
            assert not raised.value.retryable
        async with closing(rewards("wrong")) as backend:
            with pytest.raises(RewardError, match="401") as raised:
                await backend.score(trajectory("sum"))
            assert not raised.value.retryable

    run(work)
