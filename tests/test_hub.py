"""Models named by their id on the hub: found in a cache as huggingface_hub lays it out, or refused with the fix."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from rollart.cli import main
from rollart.config.job import Job
from rollart.config.load import build_job, load_job
from rollart.config.paths import hub_id
from rollart.errors import JobError
from rollart.launch import hub
from rollart.launch.hub import with_models_here, with_models_of
from rollart_recipes.tiny import make_tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "89abcdef0123456789abcdef0123456789abcdef"
ID = "acme/tiny"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blobs, snapshots of two commits that link to them, and the branch that names one: as `hf download` leaves it."""
    root = tmp_path_factory.mktemp("hub")
    make_tiny(root / "made", warmup_steps=0)
    repository = root / "models--acme--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "blobs").mkdir()
    for commit in (COMMIT, OTHER):
        (repository / "snapshots" / commit).mkdir(parents=True)
        for number, file in enumerate(sorted((root / "made").iterdir())):
            blob = repository / "blobs" / f"{number:040x}"
            blob.write_bytes(file.read_bytes())
            (repository / "snapshots" / commit / file.name).symlink_to(blob)
    return root


@pytest.fixture(autouse=True)
def offline(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks the network, and no directory here is called as the model is."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    hub.found.cache_clear()


def named(path: str) -> Job:
    return build_job(
        {
            "name": "hub",
            "model": {"path": path, "context_tokens": 256},
            "tasks": [{"name": "guess", "use": "rollart.tasks.guess_number", "max_turns": 2, "max_tokens": 4}],
            "rollout": {"groups_per_step": 2},
            "pools": [{"name": "cpu", "engines": {"count": 1}}, {"name": "environments", "slots": 16}],
        }
    )


def snapshot(cache: Path, commit: str) -> str:
    return str(cache / "models--acme--tiny" / "snapshots" / commit)


def test_an_id_becomes_the_directory_of_its_commit(cache: Path) -> None:
    assert named(ID).model.path == ID
    assert with_models_here(named(ID)).model.path == snapshot(cache, COMMIT)
    assert with_models_here(named(f"{ID}@{OTHER}")).model.path == snapshot(cache, OTHER)


def test_where_its_folder_is_here_it_is_a_path(tmp_path: Path) -> None:
    """Also of a model that is yet to be made there."""
    (tmp_path / "acme").mkdir()
    assert named(ID).model.path == str(tmp_path / ID)


@pytest.mark.parametrize("text", ["models", "./acme/tiny", "../models/tiny", "~/m/x", "/abs/olute", "a/b/c", ""])
def test_what_is_no_id_is_a_path(text: str) -> None:
    assert not hub_id(text)


def test_every_key_that_names_a_model_takes_one(cache: Path) -> None:
    raw = named(ID).model_dump(mode="json", exclude_defaults=True)
    raw["train"] = {"reference": ID, "kl_coef": 0.01}
    raw["tasks"][0]["rewards"] = [{"type": "judge", "pool": "grader", "rubric": "Right."}]
    raw["pools"].append({"name": "grader", "engines": {"count": 1}, "judge": {"path": ID}})
    job = with_models_here(build_job(raw))
    judge = next(pool.judge for pool in job.pools if pool.judge is not None)
    assert {job.model.path, job.train.reference, judge.path} == {snapshot(cache, COMMIT)}


def test_check_takes_it_and_says_which_commit(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: hub\nmodel: {path: acme/tiny, context_tokens: 256}\n"
        "tasks: [{name: guess, use: rollart.tasks.guess_number, max_turns: 2, max_tokens: 4}]\n"
        "rollout: {groups_per_step: 2}\n"
        "pools: [{name: cpu, engines: {count: 1}}, {name: environments, slots: 16}]\n"
    )
    assert load_job(file).model.path == ID
    assert main(["check", str(file)]) == 0
    said = capsys.readouterr()
    assert f"path: {snapshot(cache, COMMIT)}" in said.out
    assert "model.path: acme/tiny is no directory here; taken from the hub" in said.err


def test_one_that_is_not_in_the_cache_is_refused_with_the_fix(cache: Path) -> None:
    with pytest.raises(JobError) as refused:
        with_models_here(named("acme/large"))
    said = str(refused.value)
    assert said.startswith("model.path: acme/large is no directory here, and as a model of the hub")
    assert f"not whole in the cache {cache}, and HF_HUB_OFFLINE is set" in said
    assert "run `hf download acme/large` and bring that cache here (HF_HOME names it)" in said
    assert "give a directory" in said


def test_a_run_goes_on_with_the_commit_that_it_began_with(cache: Path) -> None:
    before = with_models_here(named(f"{ID}@{OTHER}"))
    assert with_models_of(before, named(ID)).model.path == snapshot(cache, OTHER), "not the one that main is now"
    assert with_models_of(before, named("acme/large")).model.path == "acme/large"
    assert with_models_of(before, named(f"{ID}@{COMMIT}")).model.path == f"{ID}@{COMMIT}"
