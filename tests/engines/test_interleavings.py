"""Whatever comes between its steps, the engine stays exact, within its memory, and ends every request once."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.engines.embedded import drafts
from rollart.model.network import named_weights
from rollart.types import Completion, Finish, GenerateRequest, Tokens
from tests.engines.reference import check, make_engine, plain_model, random_tokens, request

SESSIONS = 5
MODELS = {kind: [plain_model(kind, seed) for seed in range(3)] for kind in ("llama", "qwen3", "qwen3-moe")}

actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, SESSIONS - 1)),
        st.tuples(st.just("add"), st.integers(0, SESSIONS - 1)),
        st.tuples(st.just("step"), st.integers(1, 12)),
        st.tuples(st.just("step"), st.integers(1, 12)),
        st.tuples(st.just("abort"), st.integers(0, 100)),
        st.tuples(st.just("swap"), st.integers(0, 2)),
    ),
    min_size=5,
    max_size=40,
)


@dataclass
class World:
    """What the test knows beside the engine."""

    history: list[Tokens] = field(default_factory=lambda: [np.zeros(0, dtype=np.int32)] * SESSIONS)
    turns: int = 0
    asked: dict[str, GenerateRequest] = field(default_factory=dict)
    done: dict[str, Completion] = field(default_factory=dict)

    def live(self) -> list[str]:
        return [name for name in self.asked if name not in self.done]

    def end(self, name: str, completion: Completion) -> None:
        assert name in self.asked
        assert name not in self.done
        self.done[name] = completion
        session = int(self.asked[name].session)
        self.history[session] = np.concatenate([self.asked[name].tokens(), completion.tokens])


@settings(max_examples=40, deadline=None)
@given(
    actions=actions,
    seed=st.integers(0, 1000),
    kind=st.sampled_from(sorted(MODELS)),
    kv_tokens=st.sampled_from([300, 600, 4000]),
    step_tokens=st.sampled_from([8, 40, 500]),
    max_batch=st.sampled_from([2, 8]),
    rash=st.booleans(),
    paged=st.booleans(),
)
def test_any_interleaving_is_exact(
    actions: list[tuple[str, int]],
    seed: int,
    kind: str,
    kv_tokens: int,
    step_tokens: int,
    max_batch: int,
    rash: bool,
    paged: bool,
) -> None:
    """`rash`: the engine guesses from a single token that was seen once, and is wrong most of the time."""
    with mock.patch.multiple(drafts, SURE=1, CONTEXT_TOKENS=1) if rash else nullcontext():
        _play(actions, seed, kind, kv_tokens, step_tokens, max_batch, paged)


def _play(
    actions: list[tuple[str, int]],
    seed: int,
    kind: str,
    kv_tokens: int,
    step_tokens: int,
    max_batch: int,
    paged: bool,
) -> None:
    rng, world = np.random.default_rng(seed), World()
    versions = {0: MODELS[kind][0]}
    beginnings = [random_tokens(rng, 17), random_tokens(rng, 40)]
    engine = make_engine(versions[0], paged=paged, kv_tokens=kv_tokens, step_tokens=step_tokens, max_batch=max_batch)

    def step() -> None:
        for name, completion in engine.step():
            world.end(name, completion)
        assert engine.kv.used_tokens <= kv_tokens
        assert engine.num_running <= max_batch

    for action, value in actions:
        match action:
            case "add":
                prompt = np.concatenate([world.history[value], random_tokens(rng, int(rng.integers(1, 60)))])
                if len(prompt) > 250:
                    prompt = random_tokens(rng, 20)
                if rng.random() < 0.5:  # as the members of a group do
                    prompt = np.concatenate([beginnings[value % 2], prompt])
                world.turns += 1
                asked = request(
                    prompt,
                    f"{value}/{world.turns}",
                    last=bool(rng.random() < 0.2),
                    max_tokens=int(rng.integers(1, 40)),
                    temperature=float(rng.choice([0.0, 0.7, 1.0])),
                    top_k=int(rng.choice([0, 5])),
                )
                world.asked[asked.id] = asked
                engine.add(asked)
            case "step":
                for _ in range(value):
                    step()
            case "abort":
                if live := world.live():
                    name = live[value % len(live)]
                    engine.abort(name)
                    step()
                    # The step under way may have ended it already.
                    assert world.done[name].finish is Finish.ABORT or (paged and name in world.done)
            case "swap":
                version = engine.version + 1
                versions[version] = MODELS[kind][value]
                engine.swap(version, named_weights(versions[version]))
    for _ in range(10_000):
        if not engine.busy:
            break
        step()
    assert not world.live()
    if paged:  # every page came back
        engine.kv.drop_parked()
        assert engine.kv.used_tokens == 0
    for name, completion in world.done.items():
        check(world.asked[name], completion, versions)
