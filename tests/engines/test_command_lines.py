"""How servers are started: loopback only, the key not on vLLM's command line, the job's settings all there.

And what vLLM is asked for; `test_vllm.py` asks a real one.
"""

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

from rollart.engines import sglang, vllm
from rollart.engines.embedded.segments import Segment
from rollart.types import Sampling


def options(line: list[str]) -> dict[str, str]:
    return {key: value for key, value in pairwise(line) if key.startswith("--")}


def test_vllm() -> None:
    line = vllm.command("py", "/m", port=81, dtype="bfloat16", max_batch=7, max_context=99, gpus=2, cpu=False)
    given = options(line)
    assert line[:4] == ["py", "-P", "-m", "vllm.entrypoints.openai.api_server"]
    assert given["--host"] == "127.0.0.1"
    assert (given["--port"], given["--dtype"], given["--tensor-parallel-size"]) == ("81", "bfloat16", "2")
    assert (given["--max-num-seqs"], given["--max-model-len"]) == ("7", "99")
    assert given["--logprobs-mode"] == "processed_logprobs"
    assert "--enforce-eager" not in line
    on_a_cpu = vllm.command("py", "/m", port=81, dtype="float32", max_batch=7, max_context=9999, gpus=1, cpu=True)
    assert {"--enforce-eager", "--no-enable-chunked-prefill"} <= set(on_a_cpu)
    assert int(options(on_a_cpu)["--max-num-batched-tokens"]) >= 9999, "a whole prompt fits in one step"
    variables = vllm.environment("secret", 3, cpu=False)
    assert "secret" not in line
    assert variables["ROLLART_SERVER_TOKEN"] == "secret"
    assert given["--middleware"] == "rollart_access.TokenOnly"
    assert given["--worker-extension-cls"] == "rollart_weights.RollartWeights"
    assert sorted(path.name for path in Path(variables["PYTHONPATH"]).glob("*.py")) == [
        "rollart_access.py",
        "rollart_sglang.py",
        "rollart_weights.py",
    ], "nothing of ours but what runs in servers"
    assert variables["VLLM_SERVER_DEV_MODE"] == "1"
    assert variables["OMP_NUM_THREADS"] == "3"


def test_vllm_is_asked_for_the_whole_distribution() -> None:
    """A server's own defaults, such as a model's generation_config.json gives it, would leave a part of it."""
    asked: list[dict[str, Any]] = []

    class Answers:
        async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            asked.append(body)
            return {}

    http: Any = Answers()
    sampling = Sampling(max_tokens=9, temperature=0.7)
    segment = Segment(id="a", prompt=[1, 2], max_tokens=9, sampling=sampling, seed=5, eos=(3,), version=4)
    asyncio.run(vllm.VllmServer(http).prefill(segment))
    (body,) = asked
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
    assert (body["temperature"], body["seed"], body["stop_token_ids"]) == (0.7, 5, [3])


def test_sglang() -> None:
    line = sglang.command("py", "/m", port=81, dtype="bfloat16", max_batch=7, max_context=99, gpus=2)
    given = options(line)
    assert line[:2] == ["py", "-P"]
    assert Path(line[2]).name == "rollart_sglang.py"
    assert given["--host"] == "127.0.0.1"
    assert (given["--port"], given["--dtype"], given["--tp-size"]) == ("81", "bfloat16", "2")
    assert (given["--max-running-requests"], given["--context-length"]) == ("7", "99")
