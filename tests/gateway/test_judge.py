"""A judge of one job, asked by another: OpenAI's protocol, with the official client and with our own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from rollart.config.settings import JudgeSettings, RewardSettings
from rollart.errors import EngineError, JobError, RequestError
from rollart.gateway.judge import JudgeEndpoint
from rollart.rewards.judge import HttpJudge, JudgeRewards
from rollart.types import Sampling
from tests.contracts.reward_functions import closing, run, trajectory
from tests.rewards.test_judge import SAID, Letters, Model, words

TOKEN = "a secret of the tests"


@asynccontextmanager
async def listening(model: Model, token: str = "", context_tokens: int = 8192) -> AsyncIterator[str]:
    settings = JudgeSettings(listen="127.0.0.1:0", context_tokens=context_tokens)
    async with closing(JudgeEndpoint(model, Letters(), "judge", settings, token)) as endpoint:
        yield f"http://127.0.0.1:{endpoint.port}/v1"


def test_another_job_has_its_episodes_graded() -> None:
    async def work() -> None:
        model = Model(SAID)
        async with listening(model, TOKEN) as url:
            given = {"type": "judge", "url": url, "model": "judge", "rubric": "Be brief.", "votes": 2, "max_tokens": 77}
            settings = RewardSettings.model_validate(given)
            async with closing(JudgeRewards(settings, words, HttpJudge(settings, TOKEN))) as backend:
                score = await backend.score(trajectory("sum"))
        assert (score.value, score.calls) == (0.75, 2)
        assert "Be brief." in Letters().decode(model.requests[0].tokens())
        seeds = [request.sampling.seed for request in model.requests]
        assert len(set(seeds)) == 2
        assert [request.sampling for request in model.requests] == [
            Sampling(max_tokens=77, temperature=1.0, seed=seed) for seed in seeds
        ]
        assert len({request.session for request in model.requests}) == 2

    run(work)


def test_the_official_client_asks_it() -> None:
    async def work() -> None:
        async with listening(Model(SAID), TOKEN) as url:
            async with openai.AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client:
                assert [one.id for one in (await client.models.list()).data] == ["judge"]
                said = await client.chat.completions.create(
                    model="judge", messages=[{"role": "user", "content": "How good?"}], logprobs=True
                )
            assert said.choices[0].message.content == SAID
            assert said.choices[0].logprobs is not None
            assert said.usage is not None
            assert said.usage.completion_tokens == len(SAID)

    run(work)


@pytest.mark.parametrize(
    ("body", "status", "match"),
    [
        ({"messages": []}, 400, "messages"),
        ({"stream": True}, 400, "stream"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"seed": "x"}, 400, "seed"),
        ({"messages": [{"role": "user", "content": "x" * 100}]}, 400, "do not fit in 64"),
    ],
)
def test_what_it_cannot_answer_is_refused(body: dict[str, object], status: int, match: str) -> None:
    async def work() -> None:
        async with listening(Model(SAID), context_tokens=64) as url, httpx.AsyncClient(trust_env=False) as client:
            whole = {"messages": [{"role": "user", "content": "How good?"}], **body}
            answer = await client.post(f"{url}/chat/completions", json=whole)
            assert answer.status_code == status
            assert match in answer.text

    run(work)


def test_its_token_is_demanded_and_its_engines_errors_are_told() -> None:
    async def work() -> None:
        asked = {"messages": [{"role": "user", "content": "How good?"}]}
        async with httpx.AsyncClient(trust_env=False) as client:
            async with listening(Model(SAID), TOKEN) as url:
                for path, how in (("chat/completions", "POST"), ("models", "GET")):
                    answer = await client.request(how, f"{url}/{path}", json=asked)
                    assert (answer.status_code, "ROLLART_JUDGE_TOKEN" in answer.text) == (401, True)
            for error, status in ((EngineError("gone"), 503), (RequestError("too long"), 400)):
                async with listening(Model(error)) as url:
                    assert (await client.post(f"{url}/chat/completions", json=asked)).status_code == status

    run(work)


def test_an_address_that_is_taken_is_told_before_anything_starts() -> None:
    async def work() -> None:
        async with listening(Model(SAID)) as url:
            port = url.split(":")[2].removesuffix("/v1")
            with pytest.raises(JobError, match=r"pools\.judge\.judge\.listen: nothing can listen on 127"):
                JudgeEndpoint(Model(SAID), Letters(), "judge", JudgeSettings(listen=f"127.0.0.1:{port}"), "")
            await asyncio.sleep(0)

    run(work)
