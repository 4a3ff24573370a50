"""One rank of the sharded trainer: FSDP2 (`fully_shard`) over all ranks, gloo on CPUs, nccl on GPUs.

Owns: this rank's shards of weights and moments. Each layer is a unit of sharding, and what is left of the model
(embeddings, norm, head) another; weights are float32 masters, cast to bfloat16 for computing where `bf16` is set.
Invariants: all ranks make the same calls in the same order (`RankedTrainer` in ranks.py, the only caller, sees to it);
the current and the previous version can be published while a step is under way, from copies of the shards on the CPU
and over a process group of its own; a checkpoint holds whole tensors, so that any number of ranks may continue it, and
so may the single-device trainer.
"""

import gc
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rollart.errors import StoreFull, TrainerError, writing
from rollart.model.compiled import forget_compiled, run_layers
from rollart.model.directory import INDEX, copy_other_files, unit_of
from rollart.model.network import (
    PROBE_LENGTH,
    PROBE_SEQUENCES,
    Scores,
    as_probe,
    empty_model,
    named_weights,
    packed_scores,
    probe_tokens,
    stay_on,
)
from rollart.train.checkpoints import (
    MODEL_DIR,
    OPTIMIZER,
    RNG,
    Checkpoints,
    optimizer_files,
    saved_version,
    write_json,
    write_state,
)
from rollart.train.gathering import Gathered, PartTarget, Shard, copied, follow, own_rows, spread
from rollart.train.memory import compiles, recomputed_layers
from rollart.train.offload import HostMemory
from rollart.train.optimizer import MASTER, MasterAdamW
from rollart.train.settings import TrainerSettings
from rollart.train.step import RankWork, UpdateReport
from rollart.train.updater import PackedScorer, Updater
from rollart.train.versions import Versions
from rollart.types import Probe, WeightManifest, WeightVersion
from rollart.workers.setup import RankSetup

PATIENCE = timedelta(hours=1)
"""How long a rank waits for the others in one collective call. A rank that dies is seen by `RankedTrainer`, which then
ends the rest; this is for a rank that hangs with nobody left to notice."""
FILE_BYTES = 4 << 30
"""Largest file of a checkpoint (but a layer stays whole): what rank 0 holds in memory while saving."""
SAVED_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Those that rank 0 reads a model in, by safetensors' names; all others as float32."""


class ShardedNetwork(nn.Module):
    """A model with its score as `forward`: FSDP gathers weights when a module is called, the head's included."""

    def __init__(self, network: PreTrainedModel, mesh: DeviceMesh, *, bf16: bool) -> None:
        super().__init__()
        self.network = network
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else torch.float32, reduce_dtype=torch.float32)
        layers = cast(nn.ModuleList, network.base_model.layers)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        # Also the last unit is given back after each forward pass: between steps every weight is a shard.
        fully_shard(self, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        for module in (*layers, self):
            unit = cast(FSDPModule, module)
            # Each rank's loss is its share of the whole: gradients are added up, not averaged.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    @torch.no_grad()
    def probe(self, device: torch.device) -> Probe:
        """As `rollart.model.network.probe`; all ranks call it together."""
        tokens_T = probe_tokens(self.network)
        all_T = torch.ones_like(tokens_T, dtype=torch.bool, device=device)
        lengths = [PROBE_LENGTH] * PROBE_SEQUENCES
        logprobs_T = self(tokens_T.to(device), lengths, 1.0, all_T).logprobs_T
        return as_probe(tokens_T, logprobs_T)

    def forward(self, tokens_T: Tensor, lengths: Sequence[int], temperature: float, wanted_T: Tensor) -> Scores:
        return packed_scores(self.network, tokens_T, lengths, temperature, wanted_T)


class _Live(NamedTuple):
    """What changes with every update: this rank's part of it, and what the whole says of the probe."""

    sharded: ShardedNetwork
    optimizer: MasterAdamW
    updater: Updater
    probe: Probe | None


class ShardedTrainer:
    """The synchronous core of one rank. `train_step`, `save` and `restore` from one thread; `publish` from any."""

    def __init__(self, settings: TrainerSettings, at: RankSetup) -> None:
        self._settings, self._train = settings, settings.job.train
        torch.set_num_threads(self._train.threads)
        self._rank, self._ranks = at.rank, at.world_size
        self.device = torch.device(at.device)
        self._mesh = self._meet(at)
        # Over the CPU, and each with its own order of calls, so that neither meets the other or a step.
        self._to_publish = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._to_save = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._checkpoints = Checkpoints(settings.checkpoint_dir, settings.job.checkpoint.keep)
        self._memory = HostMemory()
        self.versions = Versions(self._copy)
        self._reference: PackedScorer | None = None
        if (path := settings.reference_path) is not None:
            self._reference = self._load_network(path).requires_grad_(False)
        self._live: _Live | None = None
        self.restore("")

    @property
    def vocab_size(self) -> int:
        return int(self.sharded.network.config.vocab_size)

    def train_step(self, step: WeightVersion, shares: Sequence[RankWork], lr: float, begin: bool) -> list[UpdateReport]:
        """This rank's part of the updates of step `step`, up to the first that is not made."""
        assert step == self.versions.current, f"step {step} on version {self.versions.current}"
        self.versions.of(step)
        return list(self.updater.updates(step, shares, lr, begin=begin))

    def end_step(self) -> None:
        """The weights as they are now are of the next version."""
        # The probe here, since it needs all ranks; nobody copies between the last update and `advance`.
        live = self._held()
        self._live = live._replace(probe=self._probe_of(live.sharded))
        self.versions.advance()

    def publish(self, version: WeightVersion, store: PartTarget) -> WeightManifest | None:
        """Push a version: all ranks together, rank 0 to the store. None where one of them does not hold it any more."""
        try:
            shards, probe = self.versions.of(version)
        except TrainerError:
            shards, probe = {}, None
        held = torch.tensor(bool(shards), dtype=torch.int32)
        dist.all_reduce(held, dist.ReduceOp.MIN, group=self._to_publish)
        if not int(held):
            return None
        manifest: list[WeightManifest] = []
        self._gather(
            lambda: shards,
            self._to_publish,
            lambda tensors: manifest.append(store.push(version, tensors.in_parts(), probe)),
        )
        return manifest[0] if manifest else None

    def save(self) -> str:
        """Write a checkpoint: all ranks together, rank 0 to the disk. Returns its path there, "" elsewhere."""
        if self._rank != 0:
            self._fill(Path())
            return ""
        asked: list[Path] = []

        def fill(folder: Path) -> None:
            asked.append(folder)
            self._fill(folder)

        try:
            return str(self._checkpoints.write(self.versions.current, fill))
        except StoreFull:
            if not asked:
                self._fill(None)  # the others wait to hand over their shards
            raise

    def restore(self, reference: str) -> WeightVersion:
        """Continue from a checkpoint, or from the initial weights where `reference` is empty."""
        version = saved_version(reference) if reference else 0
        path = Path(reference) if reference else self._settings.model_path
        self.versions.reset(version, self._let_go)
        forget_compiled()
        gc.collect()  # sharded networks refer to themselves
        sharded = self._load_network(path / MODEL_DIR if reference else path)
        network = sharded.network
        compiled = compiles(self._train, network)
        run_layers(network, recompute=recomputed_layers(self._train, network), compile_=compiled)
        optimizer = MasterAdamW(network, self._train)
        if reference:
            optimizer.load(self._own_parts(path, dict(sharded.network.named_parameters())))
            self._checkpoints.use(path)

        probe = self._probe_of(sharded)

        updater = Updater(self._settings, sharded, self._reference, optimizer, self.device)
        if compiled:
            updater.warm_up()

        def put_in_place() -> None:
            self._live = _Live(sharded, optimizer, updater, probe)

        self.versions.reset(version, put_in_place)
        return version

    def _let_go(self) -> None:
        self._live = None

    def _held(self) -> _Live:
        if self._live is None:
            raise TrainerError("the rank holds no weights: a restore failed, or is under way; restore first")
        return self._live

    @property
    def sharded(self) -> ShardedNetwork:
        return self._held().sharded

    @property
    def optimizer(self) -> MasterAdamW:
        return self._held().optimizer

    @property
    def updater(self) -> Updater:
        return self._held().updater

    def close(self) -> None:
        dist.destroy_process_group()

    def _meet(self, at: RankSetup) -> DeviceMesh:
        if at.rendezvous.startswith("file:"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here: nothing listens to the outside
        stay_on(self.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            init_method=at.rendezvous,
            rank=at.rank,
            world_size=at.world_size,
            timeout=PATIENCE,
        )
        return init_device_mesh(self.device.type, (at.world_size,))

    def _load_network(self, path: Path) -> ShardedNetwork:
        """This rank's shards of a model. Rank 0 reads it, in the type of its files, and hands out one tensor after
        another; nobody else ever holds it whole, and nobody in float32."""
        sharded = self._new_network(AutoConfig.from_pretrained(str(path)), bf16=self._train.uses_bf16)
        network = sharded.network
        source: PreTrainedModel | None = None
        if self._rank == 0:
            source = AutoModelForCausalLM.from_pretrained(str(path), dtype=_type_of_files(path))
        with torch.no_grad():
            for name, param in network.named_parameters():
                whole = None if source is None else source.get_parameter(name)
                _local(param).copy_(spread(whole, param.data, self._to_save))
                if whole is not None:
                    whole.data = whole.data.new_empty(0)  # handed out
            for name, buffer in network.named_buffers():
                buffer.copy_(spread(None if source is None else source.get_buffer(name), buffer, self._to_save))
        return sharded

    def _new_network(self, config: PreTrainedConfig, *, bf16: bool) -> ShardedNetwork:
        """This rank's shards of a model, whose weights are whatever was in memory."""
        network = empty_model(config)
        sharded = ShardedNetwork(network, self._mesh, bf16=bf16)
        sharded.to_empty(device=self.device)
        network.tie_weights()
        return sharded

    def _probe_of(self, sharded: ShardedNetwork) -> Probe | None:
        """What the weights say of the probe as they are published, computed in float32 by a network of its own where
        this one computes in bfloat16. It takes the room of the gradients, which are not there between steps."""
        if not self._settings.probe:
            return None
        if not self._train.uses_bf16:
            return sharded.probe(self.device)
        exact = self._new_network(sharded.network.config, bf16=False)
        with torch.no_grad():
            for own, master in zip(exact.network.parameters(), sharded.network.parameters(), strict=True):
                _local(own).copy_(_local(master).bfloat16())
            for copy, buffer in zip(exact.network.buffers(), sharded.network.buffers(), strict=True):
                copy.copy_(buffer)
        probe = exact.probe(self.device)
        del exact
        gc.collect()  # sharded networks refer to themselves
        return probe

    def _copy(self) -> tuple[dict[str, Shard], Probe | None]:
        dtype = torch.bfloat16 if self._train.uses_bf16 else None
        return copied(self._shards(), self._memory, dtype), self._held().probe

    def _shards(self) -> dict[str, Shard]:
        return {name: Shard.of(tensor) for name, tensor in named_weights(self.sharded.network).items()}

    def _own_parts(self, path: Path, params: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """This rank's part of the saved optimizer state, as the sharded tensors that the optimizer knows."""
        found: dict[str, Tensor] = {}
        for file in optimizer_files(path):
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - not a mapping
                    param = params.get(key.partition("/")[2])
                    if key == RNG:
                        torch.set_rng_state(opened.get_tensor(key))
                    elif param is None or not (rows := opened.get_slice(key)).get_shape():
                        found[key] = opened.get_tensor(key)
                    else:
                        local = rows[own_rows(param.shape[0], self._rank, self._ranks)].to(self.device)
                        found[key] = _sharded_like(param, local)
        return found

    def _gather(
        self,
        shards: Callable[[], dict[str, Shard]],
        group: dist.ProcessGroup,
        use: Callable[[Gathered], object],
    ) -> None:
        """Let rank 0 use the whole tensors. Whatever happens there, the others stop waiting."""
        if self._rank != 0:
            follow(shards(), group)
            return
        tensors = Gathered(shards(), group)
        try:
            use(tensors)
        finally:
            tensors.close()

    def _fill(self, folder: Path | None) -> None:
        """Write all of a checkpoint below `folder` (rank 0), or help with it. None: nothing, but let the others go."""
        network, bf16 = self.sharded.network, self._train.uses_bf16

        def optimizer_state() -> dict[str, Shard]:
            masters = {f"{MASTER}/{name}": param for name, param in network.named_parameters()} if bf16 else {}
            return {key: Shard.of(tensor) for key, tensor in (masters | self.optimizer.tensors()).items()}

        def write_optimizer(tensors: Gathered) -> None:
            assert folder is not None
            extra = {RNG: torch.get_rng_state()}
            for file, names in _files(tensors, OPTIMIZER).items() or [(f"{OPTIMIZER}.safetensors", [])]:
                save_file({name: tensors[name].contiguous() for name in names} | extra, folder / file)
                extra = {}

        def write_model(tensors: Gathered) -> None:
            assert folder is not None
            (folder / MODEL_DIR).mkdir()
            copy_other_files(self._settings.model_path, folder / MODEL_DIR)
            _write_model(folder / MODEL_DIR, network, tensors, torch.bfloat16 if bf16 else torch.float32)

        full: StoreFull | None = None
        parts: list[tuple[Callable[[], dict[str, Shard]], Callable[[Gathered], None]]]
        parts = [(self._shards, write_model), (optimizer_state, write_optimizer)]
        for shards, write in parts:
            use = write if folder is not None and full is None else lambda _: None
            try:
                with writing(f"checkpoint {folder}"):
                    self._gather(shards, self._to_save, use)
            except StoreFull as error:
                full = error  # the others are on their way to the next part
        if full is not None:
            raise full
        if self._rank == 0 and folder is not None:
            write_state(folder, self.versions.current, bf16=bf16)


def _type_of_files(path: Path) -> torch.dtype:
    """That loses nothing of them. `dtype="auto"` would go by config.json, which may name a coarser one."""
    found: set[str] = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118 - not a mapping
    return SAVED_TYPES[found.pop()] if len(found) == 1 and found <= SAVED_TYPES.keys() else torch.float32


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of it, to write to."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded_like(param: nn.Parameter, local: Tensor) -> DTensor:
    weight = param.data
    assert isinstance(weight, DTensor)
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _files(tensors: Gathered, stem: str) -> dict[str, list[str]]:
    """The tensors of each file. A layer is never split: some models' weights are renamed together when saved."""
    layers: dict[str, list[str]] = {}
    for name in tensors:
        layers.setdefault(unit_of(name), []).append(name)
    sizes = {unit: sum(map(tensors.num_bytes, names)) for unit, names in layers.items()}
    split = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=FILE_BYTES
    )
    return {
        file: [name for unit in units for name in layers[unit]] for file, units in split.filename_to_tensors.items()
    }


def _write_model(folder: Path, network: PreTrainedModel, tensors: Gathered, dtype: torch.dtype) -> None:
    """A Hugging Face directory, file by file: what `save_pretrained` writes of a model that is all here."""
    network.config.dtype = str(dtype).removeprefix("torch.")
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(folder)
    if network.can_generate():
        network.generation_config.save_pretrained(folder)
    places: dict[str, str] = {}
    for file, names in _files(tensors, "model").items():
        content = revert_weight_conversion(network, {name: tensors[name].to(dtype) for name in names})
        save_file({name: tensor.contiguous() for name, tensor in content.items()}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(content, file)
    write_json(folder / INDEX, {"metadata": {}, "weight_map": places})
