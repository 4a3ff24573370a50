"""An engine that answers at once with the same completion: what is measured around it is everything but the model."""

from collections.abc import Sequence

import numpy as np

from rollart.types import Completion, Finish, GenerateRequest, Span, SwapReport, WeightManifest, WeightVersion
from rollart.workers.setup import WorkerSetup

ANSWER_TOKENS = 32


class StubEngine:
    def __init__(self, engine_id: str) -> None:
        self._answer = Completion(
            tokens=np.arange(ANSWER_TOKENS, dtype=np.int32),
            logprobs=np.full(ANSWER_TOKENS, -0.5, dtype=np.float32),
            spans=(Span(0, ANSWER_TOKENS),),
            finish=Finish.STOP,
            engine=engine_id,
        )

    async def generate(self, request: GenerateRequest) -> Completion:
        return self._answer

    async def abort(self, request_id: str) -> int:
        return 0

    async def stage(self, version: WeightVersion) -> None:
        return None

    async def swap(self, manifest: WeightManifest) -> SwapReport:
        return SwapReport(version=manifest.version)


async def start(body: str, ranks: Sequence[object] = ()) -> StubEngine:
    """In a worker's process, from its set-up."""
    return StubEngine(WorkerSetup.model_validate_json(body).name)
