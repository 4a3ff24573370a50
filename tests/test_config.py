"""The job file: every wrong job gets one line that names the key and the fix; right ones mean what they say."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from rollart.config.job import Job
from rollart.config.load import build_job, load_job, warnings
from rollart.config.settings import MODES
from rollart.errors import JobError
from rollart.hardware import HARDWARE

JOB = """
name: base
tasks:
  - {name: maths, group_size: 8}
  - {name: lake, group_size: 4}
pools:
  - {name: compute, hardware: h800, engines: {count: 2}}
  - {name: environments, slots: 512}
"""


def load(tmp_path: Path, *overrides: str, text: str = JOB) -> Job:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return load_job(path, overrides)


def refusal(tmp_path: Path, *overrides: str, text: str = JOB) -> str:
    with pytest.raises(JobError) as caught:
        load(tmp_path, *overrides, text=text)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def with_pool(third: str) -> str:
    return f"pools=[{{name: compute, hardware: h800, engines: {{}}}}, {{name: environments, slots: 9}}, {third}]"


SHARDS = ["cluster.coordinators=2", "rewards.workers=2"]
PROGRAM = ["tasks.0.agent={command: [python3, agent.py]}"]

WRONG_VALUES: list[tuple[str, list[str], str, str]] = [
    # id, overrides, the key that the message must begin with, a part of the fix
    (
        "coordinators inline",
        [*SHARDS, "cluster.type=inline"],
        "cluster.coordinators:",
        "set cluster.type to local or ray",
    ),
    ("coordinators in lockstep", [*SHARDS, "mode=sync"], "cluster.coordinators:", "rollout.stepping to asynchronous"),
    ("coordinators without engines", ["cluster.coordinators=3"], "pools.0.engines.count:", "raise it to 3 or more"),
    ("coordinators without slots", [*SHARDS, "pools.1.slots=1"], "pools.1.slots:", "raise it to 2 or more"),
    ("coordinators and engines that come", [*SHARDS, "pools.0.engines.most=4"], "pools.0.engines.most:", "remove it"),
    ("coordinators with a reward worker", [*SHARDS, "rewards.workers=1"], "rewards.workers:", "raise it to 2 or more"),
    ("coordinators at a port", [*SHARDS, *PROGRAM, "endpoint.port=8080"], "endpoint.port:", "remove it (any free one)"),
    (
        "coordinators and programs on several machines",
        [*SHARDS, *PROGRAM, "cluster={type: ray, address: auto, coordinators: 2}"],
        "cluster.coordinators:",
        "remove it, or cluster.address",
    ),
    ("unknown key", ["rolout={}"], "rolout:", "did you mean 'rollout'?"),
    ("unknown nested key", ["rollout.stalenes=2"], "rollout.stalenes:", "did you mean 'staleness'?"),
    ("unknown key in a list", ["tasks.0.group_sze=3"], "tasks.0.group_sze:", "did you mean 'group_size'?"),
    ("unknown key, none near", ["limits.zzz=3"], "limits.zzz:", "valid here: generate_s,"),
    ("no list", ["tasks.0.agent={command: python}"], "tasks.0.agent.command:", "write it as [python], with commas"),
    ("another library's name", ["train.learning_rate=1"], "train.learning_rate:", "did you mean 'lr'?"),
    ("another name, a list", ["tasks.0.num_generations=8"], "tasks.0.num_generations:", "did you mean 'group_size'?"),
    ("another name, elsewhere", ["learning_rate=1"], "learning_rate:", "did you mean 'train.lr'?"),
    ("our name, elsewhere", ["groups_per_step=4"], "groups_per_step:", "did you mean 'rollout.groups_per_step'?"),
    (
        "engine judged after its requests",
        ["limits.generate_s=60"],
        "limits.progress_s:",
        "set limits.progress_s to 30 or less",
    ),
    ("unknown key of a sim task", ["sim.tasks.maths.turn=3"], "sim.tasks.maths.turn:", "did you mean 'turns'?"),
    ("text for a number", ["rollout.staleness=two"], "rollout.staleness:", "should be a valid integer"),
    ("fraction for a count", ["train.steps=1.5"], "train.steps:", "should be a valid integer"),
    ("text for a switch", ["train.bf16=maybe"], "train.bf16:", "a valid boolean"),
    ("number for a mapping", ["rollout=5"], "rollout:", "write it as {key: value}"),
    ("text for engines", ["pools.0.engines=vllm"], "pools.0.engines:", "write it as {key: value}"),
    ("number for a list", ["tasks=5"], "tasks:", "is not a list; write it as ["),
    ("no tasks", ["tasks=[]"], "tasks:", "at least 1 item"),
    ("empty name", ["name="], "name:", "should be a valid string"),
    ("name with a space", ["name=a b"], "name:", "should match pattern"),
    ("unknown mode", ["mode=rolart"], "mode:", "did you mean 'rollart'"),
    ("unknown swap", ["rollout.swap=never"], "rollout.swap:", "between_batches, drain, when_published or after_batch"),
    ("negative bound", ["rollout.staleness=-1"], "rollout.staleness:", "greater than or equal to 0"),
    ("share above 1", ["rollout.share_tolerance=2"], "rollout.share_tolerance:", "less than or equal to 1"),
    ("affinity to no pool", ["tasks.0.affinity=comput"], "tasks.0.affinity:", "did you mean 'compute'?"),
    ("affinity to slots", ["tasks.0.affinity=environments"], "tasks.0.affinity:", "one of auto, any, compute"),
    ("bound 0, after_batch", ["rollout.staleness=0"], "rollout.staleness:", "set rollout.swap to between_batches"),
    ("late, drain", ["rollout.late=wait", "rollout.swap=drain"], "rollout.late:", "is for swap 'after_batch'"),
    ("zero engines", ["pools.0.engines.count=0"], "pools.0.engines.count:", "greater than or equal to 1"),
    ("no engines", ["pools.0.engines=null", "pools.0.slots=1"], "pools:", "add engines: {count: 1}"),
    ("no slots", ["pools.1={name: e, engines: {}}"], "pools:", "add a pool such as {name: environments, slots: 64}"),
    ("idle pool", ["pools.1.slots=null", "pools.0.slots=8"], "pools.1:", "give it one of them, or remove it"),
    ("group of one", ["tasks.0.group_size=1"], "tasks.0.group_size:", "set it to 2 or more"),
    ("min above size", ["tasks.0.min_group_size=9"], "tasks.0.min_group_size:", "lower it"),
    ("min of one", ["tasks.0.min_group_size=1"], "tasks.0.min_group_size:", "greater than or equal to 2"),
    ("task name twice", ["tasks.1.name=maths"], "tasks.1.name:", "give each its own name"),
    ("pool name twice", ["pools.1.name=compute"], "pools.1.name:", "give each its own name"),
    ("unknown hardware", ["pools.0.hardware=h80"], "pools.0.hardware:", "did you mean 'h800'?"),
    ("unknown train pool", ["train.pool=comput"], "train.pool:", "did you mean 'compute'?"),
    ("http without url", ["rewards.type=http"], "rewards.url:", "needs an address, such as http://127.0.0.1:8080"),
    ("local with url", ["rewards.url=http://a"], "rewards.url:", "only with type http or judge"),
    ("concurrency of local rewards", ["rewards.concurrency=8"], "rewards.concurrency:", "only with type http or judge"),
    (
        "workers of http rewards",
        ["rewards={type: http, url: 'http://a', workers: 8}"],
        "rewards.workers:",
        "only with type local",
    ),
    ("judge nowhere", ["rewards={type: judge, rubric: a}"], "rewards.url:", "give one of them, and only one"),
    (
        "judge in two places",
        ["rewards={type: judge, rubric: a, url: 'http://a', model: m, pool: compute}"],
        "rewards.url:",
        "give one of them, and only one",
    ),
    ("judge without a name", ["rewards={type: judge, rubric: a, url: 'http://a'}"], "rewards.model:", "called at its"),
    ("judge without a rubric", ["rewards={type: judge, pool: a}"], "rewards.rubric:", "what a good answer is"),
    ("judge in no pool", ["rewards={type: judge, pool: a, rubric: a}"], "rewards.pool:", "no pool has a judge"),
    (
        "judge in a pool of the policy",
        ["rewards={type: judge, pool: compute, rubric: a}", with_pool("{name: judges, judge: {}, engines: {}}")],
        "rewards.pool:",
        "one of judges",
    ),
    (
        "a name for a pool's judge",
        ["rewards={type: judge, pool: j, rubric: a, model: m}", with_pool("{name: j, judge: {}, engines: {}}")],
        "rewards.model:",
        "type judge and a url",
    ),
    (
        "price of a pool's judge",
        ["rewards={type: judge, pool: j, rubric: a, call_cost: 1}", with_pool("{name: j, judge: {}, engines: {}}")],
        "rewards.call_cost:",
        "a url",
    ),
    (
        "judge without engines",
        [with_pool("{name: j, slots: 1, judge: {}}")],
        "pools.2.judge:",
        "add engines: {count: 1}",
    ),
    ("judge that nobody asks", [with_pool("{name: j, judge: {}, engines: {}}")], "pools.2.judge:", "nobody asks it"),
    (
        "judge that grows",
        ["rewards={type: judge, pool: j, rubric: a}", with_pool("{name: j, judge: {}, engines: {most: 2}}")],
        "pools.2.engines.most:",
        "as many as count says",
    ),
    (
        "affinity to a judge",
        [
            "rewards={type: judge, pool: j, rubric: a}",
            with_pool("{name: j, judge: {}, engines: {}}"),
            "tasks.0.affinity=j",
        ],
        "tasks.0.affinity:",
        "one of auto",
    ),
    ("judge on no port", ["pools.0.judge={listen: here}"], "pools.0.judge.listen:", "match"),
    ("simulated judge of nobody", ["sim.judges.j={}"], "sim.judges.j:", "no pool has a judge"),
    ("memory without a price", ["rewards={type: http, url: 'http://a', memory_mb: 1}"], "rewards.memory_mb:", "gb_sec"),
    ("price of a local GB", ["rewards.gb_second_cost=1"], "rewards.gb_second_cost:", "only with type http"),
    ("no master", ["weights.type=mooncake"], "weights.master:", "as master: 10.0.0.1:50051"),
    ("master of shared memory", ["weights.master=a:1"], "weights.master:", "only with weights.type mooncake"),
    ("address of shared memory", ["weights.address=a:1"], "weights.address:", "only with weights.type tcp"),
    (
        "device without a GPU",
        ["pools.0.engines.stage=device"],
        "pools.0.engines.stage:",
        "on a CPU a swap copies nothing",
    ),
    (
        "stage of a server",
        ["pools.0.engines={type: vllm, device: cuda:0, stage: device}"],
        "pools.0.engines.stage:",
        "only with engines.type embedded",
    ),
    ("site without a network", ["pools.0.site=a"], "pools.0.site:", "only with weights.type tcp, and engines"),
    ("address without a port", ["weights={type: tcp, address: a}"], "weights.address:", "match"),
    ("wait without ray", ["cluster.wait_s=5"], "cluster.wait_s:", "only with cluster.type ray"),
    ("check without ray", ["cluster.check=false"], "cluster.check:", "cluster.type ray and an address"),
    ("resource without ray", ["pools.0.resource=a"], "pools.0.resource:", "only with cluster.type ray"),
    ("workers without ray", ["pools.1.slots_per_worker=8"], "pools.1.slots_per_worker:", "cluster.type ray and slots"),
    ("isolation of nothing", ["pools.0.isolation=inline"], "pools.0.isolation:", "only with slots"),
    ("two agents", ["tasks.0.agent={use: 'a:b', command: [c]}"], "tasks.0.agent.use:", "and only one"),
    (
        "sync off-policy",
        ["mode=sync", "rollout.staleness=2"],
        "rollout.staleness: 2 is",
        "set rollout.staleness=0 or remove",
    ),
    (
        "sync+ off-policy",
        ["rollout.staleness=1", "mode=sync+"],
        "rollout.staleness: 1 is",
        "take mode areal or rollart",
    ),
    ("one-off by two", ["mode=one-off", "rollout.staleness=2"], "rollout.staleness: 2 is", "set rollout.staleness=1"),
    ("program in step", ["tasks.0.agent={command: [c]}", "mode=sync"], "tasks.0.agent:", "stepping to asynchronous"),
    ("endpoint of nobody", ["endpoint.port=8000"], "endpoint.port:", "an agent.function or agent.command of a task"),
    ("project without wandb", ["track.project=a"], "track.project:", "only with track.wandb offline or online"),
    ("weight and quota", ["tasks.0.quota=4", "tasks.0.weight=2"], "tasks.0.weight:", "only with no quota"),
    ("top_p of greedy play", ["tasks.0.temperature=0", "tasks.0.top_p=0.5"], "tasks.0.top_p:", "a temperature above 0"),
    ("cold start of local rewards", ["sim.reward.idle_s=1"], "sim.reward.idle_s:", "only with rewards.type http"),
    ("news of nobody", ["sim.control.news_s=1"], "sim.control.news_s:", "a cluster.coordinators above 1"),
    ("tail without a share", ["sim.tasks.maths.reset_tail_s=1"], "sim.tasks.maths.reset_tail_s:", "a reset_tail above"),
    (
        "constant spread",
        ["sim.tasks.maths.turns={mean: 4, sigma: 2}"],
        "sim.tasks.maths.turns.sigma:",
        "set kind, or remove it",
    ),
    ("quotas too large", ["tasks.0.quota=17"], "tasks:", "lower them or raise groups_per_step"),
    ("quotas leave nothing", ["tasks.0.quota=16"], "tasks:", "lower one, or raise rollout.groups_per_step"),
    ("quotas too small", ["tasks.0.quota=3", "tasks.1.quota=3"], "tasks:", "make them equal"),
    ("rolling all", ["rollout.rolling=2"], "rollout.rolling:", "set it to 0 (all at once) or below their number"),
    ("rolling with drain", ["rollout.swap=drain", "rollout.rolling=1"], "rollout.rolling:", "set rolling to 0"),
    ("answer fills context", ["tasks.0.max_tokens=32768"], "tasks.0.max_tokens:", "lower max_tokens or raise context"),
    ("no learning rate", ["train.lr=.nan"], "train.lr:", "should be a finite number"),
    ("negative learning rate", ["train.lr=-1"], "train.lr:", "should be greater than 0"),
    (
        "a clip range that never acts",
        ["train.eps_high=0.28", "train.correction=decoupled"],
        "train.eps_high: has no effect with train.correction decoupled and one update a step",
        "set train.correction to bypass, or train.updates_per_step to 2 or more",
    ),
    (
        "an algorithm that never clips",
        ["train.algorithm=cispo", "train.correction=none"],
        "train.algorithm: cispo: has no effect with train.correction none",
        "set train.correction to bypass",
    ),
    (
        "a clip that no ratio reaches",
        ["train.eps_low=1"],
        "train.eps_low: 1 has no effect with algorithm grpo: ratios are above 0",
        "give less than 1, such as 0.2",
    ),
    ("a cap without weights", ["train.weight_cap=3", "train.correction=none"], "train.weight_cap:", "remove it"),
    (
        "one weight for a sequence without weights",
        ["train.weight_level=sequence"],
        "train.weight_level:",
        "only with train.correction decoupled",
    ),
    ("a mask without weights", ["train.over_cap=mask", "train.correction=none"], "train.over_cap:", "remove it"),
    ("a floor without a mask", ["train.weight_floor=0.5"], "train.weight_floor:", "only with train.over_cap mask"),
    ("a floor above one", ["train.weight_floor=1", "train.over_cap=mask"], "train.weight_floor:", "less than 1"),
    (
        "a cap below the clip range",
        ["train.weight_cap=2", "train.algorithm=cispo"],
        "train.weight_cap: 2 cuts ratios before the clip range of cispo does",
        "give 5 or more",
    ),
    ("clip without a clip", ["train.algorithm=rloo", "train.eps_high=0.2"], "train.eps_high:", "remove it"),
    (
        "length of another loss",
        ["train.length_constant=64"],
        "train.length_constant:",
        "only with train.algorithm dr_grpo",
    ),
    ("reference without a KL", ["train.reference=models/a"], "train.reference:", "only with a KL, by train.kl_coef"),
    ("one checkpoint kept", ["checkpoint.keep=1"], "checkpoint.keep:", "greater than or equal to 2"),
    ("top_p of nothing", ["tasks.0.top_p=0"], "tasks.0.top_p:", "greater than 0"),
    ("negative top_k", ["tasks.0.top_k=-1"], "tasks.0.top_k:", "greater than or equal to 0"),
    ("empty stop", ["tasks.0.stop=['']"], "tasks.0.stop.0:", "at least 1 character"),
    (
        "top_p on vllm",
        ["pools.0.engines.type=vllm", "tasks.1.top_p=0.9"],
        "tasks.1.top_p:",
        "use embedded or sglang engines",
    ),
    ("top_k on vllm", ["pools.0.engines.type=vllm", "tasks.0.top_k=8"], "tasks.0.top_k:", "remove it"),
    ("unknown sim task", ["sim.tasks.math={}"], "sim.tasks.math:", "did you mean 'maths'?"),
    ("unknown sim model", ["sim.model=qwen3-9b"], "sim.model:", "did you mean 'qwen3-8b'?"),
    ("no sim profile", ["sim.profile=none.yaml"], "sim.profile:", "give the path of a YAML file"),
    ("text for a spread", ["sim.tasks.maths.turns=many"], "sim.tasks.maths.turns:", "write it as {key: value}"),
    (
        "unknown fault",
        ["sim.faults=[{kind: engine_deth, at_s: 1}]"],
        "sim.faults.0.kind:",
        "did you mean 'engine_death'",
    ),
    ("fault, both times", ["sim.faults=[{kind: env_hang, at_s: 1, swap: 1}]"], "sim.faults:", "and only one"),
    ("fault, no time", ["sim.faults=[{kind: env_hang}]"], "sim.faults:", "needs at_s (seconds) or swap"),
    ("chaos turned round", ["sim.chaos.faults=[8, 3]"], "sim.chaos.faults:", "swap them"),
    ("override without value", ["rollout.staleness"], "override 'rollout.staleness'", "write it as key=value"),
    ("override without key", ["=2"], "override '=2'", "write it as key=value"),
    ("override, not YAML", ["name=["], "override name:", "quote it"),
    ("override below a value", ["name.x=1"], "override name.x:", "has no keys below it"),
    ("override, no such index", ["tasks.7.group_size=3"], "override 'tasks.7.group_size=3'", "a position (0 to 1)"),
    ("override, no such name", ["tasks.chess.group_size=3"], "override 'tasks.chess.group_size=3'", "nor a name"),
]


@pytest.mark.parametrize(("overrides", "key", "fix"), [pytest.param(*case[1:], id=case[0]) for case in WRONG_VALUES])
def test_a_wrong_value_is_refused_with_its_key_and_fix(
    overrides: list[str], key: str, fix: str, tmp_path: Path
) -> None:
    message = refusal(tmp_path, *overrides)
    assert message.startswith(key)
    assert fix in message


WRONG_TEXTS = [
    ("missing name", JOB.replace("name: base", ""), "name: missing", "add it (see docs/job.md"),
    ("missing pools", "name: a\ntasks: [{name: maths}]\n", "pools: missing", "add it (see docs/job.md"),
    ("missing task name", JOB.replace("name: maths, ", ""), "tasks.0.name: missing", "add it (see docs/job.md"),
    ("not YAML", "name: [\n", "job.yaml line 2: not valid YAML", "check the indentation and the quotes there"),
    ("tab", "name: a\n\tseed: 1\n", "job.yaml line 2: not valid YAML", "check the indentation"),
    ("key given twice", JOB + "seed: 1\nseed: 2\n", "key 'seed' is given twice", "check the indentation"),
    ("nested key given twice", JOB + "train: {lr: 1, lr: 2}\n", "key 'lr' is given twice", "check the indentation"),
    ("a list", "- name: a\n", "job.yaml: a job file is a mapping of keys", "such as `name: my-job`"),
    ("empty", "", "job.yaml: a job file is a mapping of keys", "such as `name: my-job`"),
]


@pytest.mark.parametrize(("text", "key", "fix"), [pytest.param(*case[1:], id=case[0]) for case in WRONG_TEXTS])
def test_a_wrong_file_is_refused_with_its_place_and_fix(text: str, key: str, fix: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, text=text)
    assert key in message
    assert fix in message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    binary = tmp_path / "model.bin"
    binary.write_bytes(b"\xff\xfe\x80")
    for path, problem in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "Is a directory"), (binary, "not text")):
        with pytest.raises(JobError, match=problem) as caught:
            load_job(path)
        assert str(caught.value).startswith(str(path))
        assert "such as jobs/rollart.yaml" in str(caught.value)


def test_defaults(tmp_path: Path) -> None:
    job = load(tmp_path)
    assert job.mode == "rollart"
    assert [task.name for task in job.tasks] == ["maths", "lake"]
    assert [pool.name for pool in job.engine_pools] == ["compute"]
    assert job.train_pool.name == "compute"
    assert job.slots == 32
    assert [task.smallest_group for task in job.tasks] == [4, 2]


def test_figures_that_follow_from_settings(tmp_path: Path) -> None:
    job = load(
        tmp_path,
        "rollout={groups_per_step: 10, staleness: 2, spare_groups: 3}",
        "train.pool=environments",
        "tasks.maths.min_group_size=7",
    )
    assert job.slots == 33
    assert job.train_pool.name == "environments"
    assert job.tasks[0].smallest_group == 7


def test_a_pool_may_only_train(tmp_path: Path) -> None:
    job = load(tmp_path, "pools.0.slots=8", "pools.1={name: trainers, hardware: h100}", "train.pool=trainers")
    assert job.train_pool.hardware == "h100"


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_fills_its_bundle(mode: str, tmp_path: Path) -> None:
    rollout = load(tmp_path, f"mode={mode}", "rollout.groups_per_step=8").rollout
    assert {key: getattr(rollout, key) for key in MODES[mode]} == MODES[mode]
    assert rollout.groups_per_step == 8


def test_the_default_mode_is_what_the_defaults_say(tmp_path: Path) -> None:
    assert load(tmp_path).rollout == load(tmp_path, "mode=rollart").rollout == Job.model_fields["rollout"].default


def test_a_key_the_job_gives_wins_over_its_mode(tmp_path: Path) -> None:
    text = JOB + "mode: sync\nrollout: {stepping: asynchronous}\n"
    assert load(tmp_path, text=text).rollout == load(tmp_path, "mode=sync+").rollout
    assert load(tmp_path, "rollout.staleness=3", "mode=areal").rollout.staleness == 3


def test_an_empty_section_is_filled_by_the_mode(tmp_path: Path) -> None:
    assert load(tmp_path, text=JOB + "mode: areal\nrollout:\n").rollout.swap == "when_published"


def test_overrides_reach_list_items_by_position_and_by_name(tmp_path: Path) -> None:
    job = load(tmp_path, "tasks.0.group_size=6", "tasks.lake.group_size=2", "pools.compute.engines.count=5")
    assert [task.group_size for task in job.tasks] == [6, 2]
    assert job.pools[0].engines is not None
    assert job.pools[0].engines.count == 5


def test_overrides_replace_items_make_sections_and_read_yaml(tmp_path: Path) -> None:
    job = load(tmp_path, "tasks.1={name: chess}", "train.lr=1e-6", "checkpoint.every=3", "sim.tasks.maths.turns=12")
    assert [task.name for task in job.tasks] == ["maths", "chess"]
    assert job.train.lr == 1e-6
    assert job.checkpoint.every == 3
    assert job.sim.tasks["maths"].turns.mean == 12


def test_a_word_that_yaml_takes_for_a_truth_value_is_the_word(tmp_path: Path) -> None:
    job = load(tmp_path, "train.compile=off", "track.wandb=off", "weights={type: tcp, delta: off}")
    assert (job.train.compile, job.track.wandb, job.weights.delta) == ("off", "off", "off")
    assert load(tmp_path, "train.compile=on", "train.device=cuda:0").train.compile == "on"


def test_the_last_override_wins(tmp_path: Path) -> None:
    assert load(tmp_path, "seed=1", "seed=2").seed == 2


def test_a_value_may_hold_an_equals_sign(tmp_path: Path) -> None:
    job = load(tmp_path, "rewards={type: http, url: 'http://a'}", "rewards.url=http://a/?b=c")
    assert job.rewards.url == "http://a/?b=c"


PROFILE = """
model: qwen3-32b
tasks:
  maths: {turns: 3, success: 0.1}
  lake: {turns: {kind: lognormal, mean: 9, sigma: 0.5}}
links: {push_gb_s: 4}
"""


def test_a_profile_is_merged_below_the_job(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text(PROFILE)
    text = JOB + "sim: {profile: profile.yaml, tasks: {maths: {success: 0.9}}, links: {pull_gb_s: 8}}\n"
    sim = load(tmp_path, text=text).sim
    assert sim.model == "qwen3-32b"
    assert (sim.tasks["maths"].turns.mean, sim.tasks["maths"].success) == (3, 0.9)
    assert (sim.tasks["lake"].turns.kind, sim.tasks["lake"].turns.mean) == ("lognormal", 9)
    assert (sim.links.push_gb_s, sim.links.pull_gb_s) == (4, 8)


def test_a_kind_of_hardware_of_one_s_own_is_as_good_as_a_known_one(tmp_path: Path) -> None:
    own = "hardware={b200: {tflops: 2250, memory_gb: 180, bandwidth_gb_s: 8000, cost: 6}}"
    job = load(tmp_path, own, "pools.0.hardware=b200")
    assert (job.kinds["b200"].bandwidth_gb_s, job.kinds["b200"].cost) == (8000, 6)
    assert job.kinds["h20"] == HARDWARE["h20"]
    with pytest.raises(JobError, match=r"hardware: 'b300' is not known, did you mean 'b200'"):
        load(tmp_path, own, "pools.0.hardware=b300")


def test_a_folder_with_a_config_is_a_simulated_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "vocab_size": 1000, "dtype": "bfloat16"}))
    shape = load(tmp_path, f"sim.model={tmp_path}").sim.shape
    assert (shape.layers, shape.hidden, shape.bytes_per_param) == (2, 64, 2.0)


def test_an_override_wins_over_the_profile(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text(PROFILE)
    sim = load(tmp_path, f"sim.profile={tmp_path}/profile.yaml", "sim.model=qwen3-8b").sim
    assert sim.model == "qwen3-8b"
    assert sim.tasks["maths"].turns.mean == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"modle: qwen3-8b", "sim.modle: unknown key, did you mean 'model'"),
        (b"\xff", "not text"),
        (b"a: [", "not valid"),
    ],
)
def test_a_wrong_profile_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_bytes(content)
    assert message in refusal(tmp_path, f"sim.profile={tmp_path}/profile.yaml")


PLACES = """
model: {path: models/a}
train: {reference: ../b, kl_coef: 0.1}
weights: {type: files, path: weights}
"""


def paths_of(job: Job) -> tuple[object, ...]:
    assert job.pools[0].engines is not None
    uses = [task.use for task in job.tasks]
    return job.model.path, job.train.reference, job.weights.path, *uses, job.pools[0].engines.python


def test_paths_are_relative_to_the_file_and_in_overrides_to_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs" / "models").mkdir(parents=True)  # else models/a would be one on the hub
    (tmp_path / "here").mkdir()
    text = JOB.replace("name: maths,", "name: maths, use: my_task.py,").replace(
        "{count: 2}", "{type: vllm, python: venv/bin/python}"
    )
    (tmp_path / "jobs" / "job.yaml").write_text(text.replace("name: lake,", "name: lake, use: ../l.py:Lake,") + PLACES)
    monkeypatch.chdir(tmp_path / "here")
    job = load_job(Path("../jobs/job.yaml"))
    near = tmp_path / "jobs"
    assert paths_of(job) == tuple(
        map(
            str,
            (
                near / "models/a",
                tmp_path / "b",
                near / "weights",
                near / "my_task.py",
                f"{tmp_path}/l.py:Lake",
                near / "venv/bin/python",
            ),
        )
    )
    job = load_job(
        Path("../jobs/job.yaml"),
        [
            "model.path=m",
            "train.reference=/abs/r",
            "weights={type: files, path: w}",
            "tasks.0.use=package.module",
            "tasks.1={name: lake, use: l.py}",
            "pools.0.engines.python=python3",
        ],
    )
    here = tmp_path / "here"
    assert paths_of(job) == (f"{here}/m", "/abs/r", f"{here}/w", "package.module", f"{here}/l.py", "python3")


def test_a_job_that_was_read_means_the_same_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = load(tmp_path, text=JOB + PLACES)
    monkeypatch.chdir("/")
    assert build_job(job.model_dump(mode="json")) == job


def test_a_job_cannot_be_changed(tmp_path: Path) -> None:
    job = load(tmp_path)
    for settings, key, value in ((job, "seed", 1), (job.rollout, "staleness", 5), (job.tasks[0], "group_size", 2)):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(settings, key, value)


def test_build_job_leaves_its_input_alone() -> None:
    raw: dict[str, Any] = yaml.safe_load(JOB + "mode: sync\nrollout: {groups_per_step: 4}\n")
    build_job(raw)
    assert raw["rollout"] == {"groups_per_step": 4}


def test_a_resolved_job_reads_back_the_same(tmp_path: Path) -> None:
    job = load(tmp_path, "mode=areal", "sim.faults=[{kind: env_hang, at_s: 3}]")
    assert build_job(yaml.safe_load(yaml.safe_dump(job.model_dump(mode="json")))) == job


def test_an_ordinary_job_gives_no_warning(tmp_path: Path) -> None:
    assert warnings(load(tmp_path)) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pools.environments.slots=191"], "pools: 191 environment slots for about 192 trajectories"),
        (["pools.environments.slots=64", "tasks.0.quota=8", "tasks.1.quota=8"], "about 192 trajectories"),
        (["pools.environments.slots=64", "tasks.0.quota=4"], "about 160 trajectories"),
        (
            ["pools.environments.slots=64", "rollout.spare_members=1", "rollout.spare_groups=8"],
            "about 280 trajectories",
        ),
        (["mode=areal"], "rollout.recheck: 'start' lets trajectories grow older"),
        (["tasks.1.temperature=0"], "tasks.1.temperature: 0 makes all members of a group alike"),
        (["tasks.0.top_p=0.9"], "tasks.0.top_p: answers are sampled from a part of the distribution"),
        (["tasks.1.top_k=8"], "training learns from log-probabilities of the full one"),
        (["sim.tasks.maths.turns=2"], "sim.tasks: 'lake' is not described"),
        (["train.steps=5"], "checkpoint.every: 10 is more than train.steps 5"),
        (["train.algorithm=gspo"], "train.correction: with bypass the rounding of engines alone passes"),
    ],
)
def test_unlikely_settings_are_warned_about(overrides: list[str], message: str, tmp_path: Path) -> None:
    found = warnings(load(tmp_path, *overrides))
    assert len(found) == 1
    assert message in found[0]


def test_vllm_takes_stop_strings(tmp_path: Path) -> None:
    job = load(tmp_path, "pools.0.engines.type=vllm", "tasks.0.stop=[</answer>]")
    assert job.tasks[0].stop == ("</answer>",)


@pytest.mark.parametrize(
    "acts", [(), ("train.correction=bypass",), ("train.correction=decoupled", "train.updates_per_step=2")]
)
def test_a_clip_that_acts_is_taken(acts: tuple[str, ...], tmp_path: Path) -> None:
    assert load(tmp_path, "train.algorithm=dapo", "train.eps_low=0.1", *acts).train.eps_low == 0.1


@pytest.mark.parametrize(
    "acts",
    [
        ("train.eps_low=0.2", "train.eps_high=0.2"),
        ("train.correction=decoupled", "train.updates_per_step=2"),
    ],
)
def test_gspo_whose_clip_range_is_wider_than_rounding_is_quiet(acts: tuple[str, ...], tmp_path: Path) -> None:
    assert warnings(load(tmp_path, "train.algorithm=gspo", *acts)) == []


@pytest.mark.parametrize("given", ["train.algorithm=cispo", "train.algorithm=grpo"])
def test_a_lower_end_of_nothing_is_for_cispo_alone(given: str, tmp_path: Path) -> None:
    low = 1.0 if "cispo" in given else 0.99
    assert load(tmp_path, given, f"train.eps_low={low}").train.eps_low == low


def test_the_edge_of_enough_slots_is_quiet(tmp_path: Path) -> None:
    assert warnings(load(tmp_path, "pools.environments.slots=192")) == []


def test_texts_of_a_tasks_arguments_that_look_like_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    given = {
        "paths": ["a.jsonl", "./b", "../c.x", "d/e.py:f", "g.csv"],
        "others": ["openai/gsm8k", "module:function", "Read a.csv", "{q}.csv", "https://h/x.jsonl", "./".strip("/")],
    }
    text = JOB.replace("name: maths,", f"name: maths, args: {given},")
    args = next(task.args for task in load(tmp_path, text=text).tasks if task.name == "maths")
    names = ("a.jsonl", "b", "../c.x", "d/e.py:f", "g.csv")
    assert args["paths"] == [str((tmp_path / name).parent.resolve() / Path(name).name) for name in names]
    assert args["others"] == given["others"]


def test_an_agent_is_a_class_or_a_program_and_its_file_is_beside_the_job(tmp_path: Path) -> None:
    by_text = load(tmp_path, "tasks.0.agent=mine.py:Mine").tasks[0].agent
    assert by_text is not None
    assert by_text.use == f"{Path.cwd()}/mine.py:Mine"
    program = load(tmp_path, "tasks.0.agent={function: mine.py:solve}")
    assert [task.name for task in program.programs] == [program.tasks[0].name]
    assert program.tasks[0].agent is not None
    assert program.tasks[0].agent.function == f"{Path.cwd()}/mine.py:solve"


def test_a_chat_template_is_a_file_or_its_text(tmp_path: Path) -> None:
    found = load(
        tmp_path, text=JOB + "model: {chat_template: own.jinja, chat_template_args: {enable_thinking: false}}\n"
    )
    assert found.model.chat_template == str(tmp_path / "own.jinja")
    assert found.model.chat_template_args == {"enable_thinking": False}
    text = load(tmp_path, text=JOB + "model: {chat_template: '{{ messages }}'}\n").model.chat_template
    assert text == "{{ messages }}"
