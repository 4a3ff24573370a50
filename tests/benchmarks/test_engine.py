"""`python -m benchmarks.engine`: all sides do the same work, and the figures are there. How fast is not asked here."""

from pathlib import Path

import pytest

from benchmarks import engine as bench
from benchmarks.engine_sides import EmbeddedSide, GenerateSide, Side, TransformersBatchingSide
from benchmarks.engine_workload import Answers, build_workload
from rollart.errors import JobError

SMALL = bench.Shape(hidden=32, layers=2, vocab=97)


def test_an_edition_changes_the_words_and_not_the_lengths() -> None:
    first, again, other = (
        build_workload(sessions=4, turns=3, vocab=100, prompt_tokens=5, edition=edition) for edition in (0, 0, 1)
    )
    assert first == again
    assert first.lengths == other.lengths
    assert all(mine != theirs for mine, theirs in zip(first.prompts, other.prompts, strict=True))
    assert {len(prompt) for session in first.prompts for prompt in session} == {5}
    assert all(16 <= length <= 128 for session in first.lengths for length in session)
    assert len({length for session in first.lengths for length in session}) > 6
    assert first.first_turns(1).lengths == tuple(session[:1] for session in first.lengths)


def test_a_side_that_does_less_has_no_figure() -> None:
    workload = build_workload(sessions=2, turns=2, vocab=100)
    answers: Answers = [[[1] * length for length in session] for session in workload.lengths]
    workload.check(answers)
    answers[1][1].pop()
    with pytest.raises(ValueError, match="asked for"):
        workload.check(answers)


def test_all_sides_give_the_same_tokens_when_greedy(tmp_path: Path) -> None:
    bench.make_model(SMALL, str(tmp_path))
    workload = build_workload(
        sessions=5, turns=3, vocab=SMALL.vocab, prompt_tokens=6, answer_tokens=(1, 9), temperature=0.0
    )
    sides: list[Side] = [
        EmbeddedSide(str(tmp_path)),
        GenerateSide(str(tmp_path)),
        TransformersBatchingSide(str(tmp_path), temperature=0.0),
    ]
    try:
        answers = [side.play(workload) for side in sides]
    finally:
        for side in sides:
            side.close()
    for found in answers:
        workload.check(found)
        assert found == answers[0]


def test_the_figures_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(bench.VLLM_PYTHON, raising=False)
    monkeypatch.setattr(bench, "MODEL", SMALL)
    settings = bench.Settings(
        sessions=3, turns={"one_turn": 1, "eight_turn": 2}, rounds=2, prompt_tokens=4, answer_tokens=(2, 5)
    )
    figures = bench.measure(settings)
    for part in (figures["one_turn"], figures["eight_turn"]):
        assert part["vs_generate"] > 0
        assert part["vs_transformers_cb"] > 0
        assert part["vs_vllm_cpu"] is None
        assert part["spread"].keys() == {"vs_generate", "vs_transformers_cb"}
        assert {name: len(rounds) for name, rounds in part["rounds"].items()} == {
            "ours": 2,
            "generate": 2,
            "transformers_cb": 2,
        }
    assert figures["eight_turn"]["prompt_tokens"] == 3 * 2 * 4
    assert figures["threads"] == 1
    assert figures["model"]["hidden"] == 32
    assert {"python", "torch", "transformers"} <= figures["versions"].keys()


def test_the_parameters_are_counted(tmp_path: Path) -> None:
    bench.make_model(SMALL, str(tmp_path))
    model = EmbeddedSide(str(tmp_path)).engine.model
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)
    assert bench.describe(SMALL)["parameters"] == matrices


def test_an_interpreter_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench.make_model(SMALL, str(tmp_path))
    monkeypatch.setenv(bench.VLLM_PYTHON, "/nowhere/python")
    with pytest.raises(JobError, match="unset it"):
        bench.make_sides(str(tmp_path))
