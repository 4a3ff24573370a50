"""The sides of `rollart bench engine`: each plays a whole workload and returns every answer.

Where a side can, a session takes its next turn as soon as its last answer is there, without waiting for the others.
"""

import os
import subprocess
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation import ContinuousBatchingConfig

from benchmarks.engine_workload import STEP_TOKENS, Answers, Workload
from rollart.config.settings import EngineSettings
from rollart.engines.embedded.engine import EmbeddedEngine
from rollart.model.network import load_model
from rollart.types import GenerateRequest, Sampling, Tokens

CACHE_TOKENS = 131_072
"""Cache of the sides that have one: room for all sessions at their longest, and as much again."""
PAGE_TOKENS = 32
"""Of transformers' continuous batching: its default."""
VLLM_SCRIPT = Path(__file__).with_name("engine_vllm.py")
VLLM_MARK = b"rollart-bench "
"""How its answers start on a standard output that it shares with vLLM's log."""
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class Side(Protocol):
    """One way to generate."""

    def play(self, workload: Workload) -> Answers: ...

    def other_cpu_s(self) -> float:
        """CPU seconds of the last play outside this process."""

    def close(self) -> None: ...


class _InProcess:
    def other_cpu_s(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


class EmbeddedSide(_InProcess):
    """Ours: a session's keys and values stay between its turns."""

    def __init__(self, folder: str) -> None:
        self.engine = EmbeddedEngine(
            load_model(folder),
            settings=EngineSettings(kv_tokens=CACHE_TOKENS, step_tokens=STEP_TOKENS),
            eos=frozenset(),
        )
        self.steps_s: list[float] = []
        """CPU seconds of each step of the last play."""

    def play(self, workload: Workload) -> Answers:
        self.steps_s = []
        answers: Answers = [[] for _ in range(workload.sessions)]
        history: list[list[Tokens]] = [[] for _ in range(workload.sessions)]
        for session in range(workload.sessions):
            self._ask(workload, session, 0, history[session])
        while self.engine.busy:
            began_s = time.process_time()
            done = self.engine.step()
            self.steps_s.append(time.process_time() - began_s)
            for name, completion in done:
                session, turn = map(int, name.split("/"))
                answers[session].append(completion.tokens.tolist())
                history[session].append(completion.tokens)
                if turn + 1 < workload.turns:
                    self._ask(workload, session, turn + 1, history[session])
        return answers

    def _ask(self, workload: Workload, session: int, turn: int, history: list[Tokens]) -> None:
        history.append(np.array(workload.prompts[session][turn], dtype=np.int32))
        self.engine.add(
            GenerateRequest(
                id=f"{session}/{turn}",
                session=str(session),
                domain="bench",
                turn=turn,
                prompt=tuple(history),
                prompt_tokens=sum(map(len, history)),
                sampling=Sampling(
                    max_tokens=workload.lengths[session][turn], temperature=workload.temperature, seed=turn
                ),
                last=turn + 1 == workload.turns,
            )
        )


class _RowLengths(StoppingCriteria):
    """Each row of a batch is done at its own length; the batch goes on until its longest is."""

    def __init__(self, prompt: int, lengths: list[int]) -> None:
        self._ends = torch.tensor([prompt + length for length in lengths])

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return self._ends <= input_ids.shape[1]


class GenerateSide(_InProcess):
    """transformers' `generate` on one left-padded batch a turn; the whole history is computed again each turn."""

    def __init__(self, folder: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def play(self, workload: Workload) -> Answers:
        answers: Answers = [[] for _ in range(workload.sessions)]
        history: list[list[int]] = [[] for _ in range(workload.sessions)]
        for turn in range(workload.turns):
            for session, known in enumerate(history):
                known += workload.prompts[session][turn]
            lengths = [session[turn] for session in workload.lengths]
            for session, answer in enumerate(self._batch(history, lengths, workload.temperature)):
                answers[session].append(answer)
                history[session] += answer
        return answers

    @torch.inference_mode()
    def _batch(self, prompts: list[list[int]], lengths: list[int], temperature: float) -> list[list[int]]:
        longest = max(map(len, prompts))
        tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        output = self._model.generate(
            input_ids=tokens,
            attention_mask=mask,
            generation_config=_plain_sampling(temperature, max(lengths)),
            stopping_criteria=StoppingCriteriaList([_RowLengths(longest, lengths)]),
        )
        return [row[longest : longest + length].tolist() for row, length in zip(output, lengths, strict=True)]


class TransformersBatchingSide(_InProcess):
    """transformers' continuous batching; each turn a new request with the whole history, prefix sharing on."""

    def __init__(self, folder: str, temperature: float = 1.0) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        generation = _plain_sampling(temperature)
        generation.eos_token_id = -1  # none
        self._temperature = temperature
        self._manager = model.init_continuous_batching(
            generation_config=generation,
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS, num_blocks=CACHE_TOKENS // PAGE_TOKENS, max_batch_tokens=STEP_TOKENS
            ),
        )
        self._manager.start()
        self._plays = 0

    def play(self, workload: Workload) -> Answers:
        answers: Answers = [[] for _ in range(workload.sessions)]
        history: list[list[int]] = [[] for _ in range(workload.sessions)]
        assert workload.temperature == self._temperature, "its temperature is set when it starts"
        self._plays += 1
        for session in range(workload.sessions):
            self._ask(workload, session, 0, history[session])
        left = workload.sessions * workload.turns
        while left:
            result = self._manager.get_result(timeout=1.0)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("transformers' continuous batching stopped; its log says why")
                continue
            if result.error is not None:
                raise RuntimeError(f"transformers' continuous batching: {result.error}")
            left -= 1
            _, session, turn = map(int, result.request_id.split("/"))
            answer = list(result.generated_tokens)
            answers[session].append(answer)
            history[session] += answer
            if turn + 1 < workload.turns:
                self._ask(workload, session, turn + 1, history[session])
        return answers

    def _ask(self, workload: Workload, session: int, turn: int, history: list[int]) -> None:
        history += workload.prompts[session][turn]
        self._manager.add_request(
            list(history),
            request_id=f"{self._plays}/{session}/{turn}",
            max_new_tokens=workload.lengths[session][turn],
        )

    def close(self) -> None:
        self._manager.stop(block=True, timeout=10)


class VllmSide:
    """vllm-cpu, prefix caching on, in an interpreter of its own that stays up between plays."""

    def __init__(self, python: str, folder: str, threads: int) -> None:
        self._process = subprocess.Popen(
            [python, str(VLLM_SCRIPT), folder, str(STEP_TOKENS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **VLLM_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)},
        )
        self._cpu_s = 0.0
        self.steps_s: list[float] = []
        """CPU seconds of each step of the last play."""
        self.version: str = self._answer()["version"]

    def play(self, workload: Workload) -> Answers:
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps(workload) + b"\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._cpu_s, self.steps_s = answer["cpu_s"], answer["steps_s"]
        answers: Answers = answer["answers"]
        return answers

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(VLLM_MARK):  # vLLM writes its log there too
                answer: dict[str, Any] = orjson.loads(line.removeprefix(VLLM_MARK))
                return answer
        raise RuntimeError(f"vLLM ended with {self._process.wait()}; what it wrote above says why")

    def other_cpu_s(self) -> float:
        return self._cpu_s

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _plain_sampling(temperature: float, max_new_tokens: int | None = None) -> GenerationConfig:
    """The full distribution, as training samples it, and no end but the length."""
    if temperature == 0.0:
        return GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=max_new_tokens)
    return GenerationConfig(
        do_sample=True, temperature=temperature, top_k=0, top_p=1.0, pad_token_id=0, max_new_tokens=max_new_tokens
    )
