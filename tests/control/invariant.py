"""The first invariant of the control plane, as a check on what a scene trained on."""

import itertools

import numpy as np

from rollart.types import Sample
from tests.control.scene import FIRST_SAMPLED, Said, Scene


def check_first_invariant(scene: Scene) -> list[Sample]:
    """Every sample that was trained on is, token for token, one session of an engine. Returns them all."""
    trained = {step for _, step, _ in scene.steps}
    samples = [sample for step in sorted(trained) for sample in scene.journal.all[step].samples]
    assert samples
    by_session: dict[str, list[Said]] = {}
    for said in scene.said:
        by_session.setdefault(said.request.session, []).append(said)
    for trajectory, group in itertools.groupby(samples, key=lambda sample: sample.trajectory):
        of_this = list(group)
        calls = sorted(by_session[str(trajectory)], key=lambda said: said.request.turn)
        assert [call.request.turn for call in calls] == list(range(len(calls)))
        prefixes: list[list[Said]] = []
        for call in calls:
            before = prefixes[-1][-1] if prefixes else None
            if (
                before is None
                or call.prompt[: len(before.prompt) + len(before.tokens)] != before.prompt + before.tokens
            ):
                prefixes.append([])
            prefixes[-1].append(call)
        assert len(of_this) == len(prefixes)
        for sample, prefix in zip(of_this, prefixes, strict=True):
            last = prefix[-1]
            assert sample.tokens.tolist() == last.prompt + last.tokens
            sampled = sample.tokens >= FIRST_SAMPLED
            assert sample.mask.tolist() == sampled.tolist()
            assert sample.tokens[sample.mask].tolist() == [token for call in prefix for token in call.tokens]
            assert sample.versions[sample.mask].tolist() == [version for call in prefix for version in call.versions]
            assert (sample.versions[~sample.mask] == -1).all()
            expected = np.array([value for call in prefix for value in call.logprobs], dtype=np.float32)
            assert sample.logprobs[sample.mask].tolist() == expected.tolist()
            assert (sample.logprobs[~sample.mask] == 0).all()
            assert (sample.advantages[~sample.mask] == 0).all()
            assert len(set(sample.advantages[sample.mask].tolist())) == 1
    return samples
