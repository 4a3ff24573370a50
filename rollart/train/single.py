"""The single-device trainer: one process, CPU or one GPU.

Owns: the policy's weights, the optimizer, and the version number (steps done). `SingleTrainer` is synchronous;
`AsyncTrainer` puts it behind the `Trainer` port, with publishing in a thread of its own, beside the next step.
Invariants: step n runs once, on version n, and gives version n + 1; the weights of the current and of the previous
version can be published, again and again, whatever step is under way; `restore(save())` continues bit for bit, and lets
go of the old network and optimizer before it reads the new ones.
"""

import asyncio
import gc
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from rollart.errors import JobError, TrainerError, boundary
from rollart.model.adapters import (
    adapter_tensors,
    add_adapters,
    load_adapters_,
    read_adapters,
    same_shape,
    write_adapters,
)
from rollart.model.compiled import forget_compiled, run_layers
from rollart.model.directory import StoredTensors, copy_other_files
from rollart.model.network import device_named, load_model, named_weights, packed_scores, probe, stay_on
from rollart.train.aside import Aside
from rollart.train.checkpoints import (
    MODEL_DIR,
    OPTIMIZER,
    RNG,
    Checkpoints,
    optimizer_files,
    saved_version,
    write_state,
)
from rollart.train.memory import compiles, keep_to_share, recomputed_layers
from rollart.train.offload import HostCopy, HostMemory
from rollart.train.optimizer import MasterAdamW
from rollart.train.settings import TrainerSettings, learning_rate
from rollart.train.step import Step, check_step
from rollart.train.updater import PackedScorer, Updater
from rollart.train.versions import Versions
from rollart.types import Batch, Probe, StepResult, WeightManifest, WeightVersion


class PushTarget(Protocol):
    """What the trainer needs of a weight store."""

    def push(
        self, version: WeightVersion, tensors: Mapping[str, Tensor], probe: Probe | None = None
    ) -> WeightManifest: ...


class _Live(NamedTuple):
    """What changes with every update."""

    network: PreTrainedModel
    optimizer: MasterAdamW
    updater: Updater


class SingleTrainer:
    """The synchronous core. `train_step`, `save` and `restore` from one thread; `publish` from any."""

    def __init__(self, settings: TrainerSettings) -> None:
        self.settings, self._train = settings, settings.job.train
        torch.set_num_threads(self._train.threads)
        self.device = device_named(self._train.device)
        stay_on(self.device)
        keep_to_share(self._train, self.device)
        self._lora = settings.lora
        self._checkpoints = Checkpoints(settings.checkpoint_dir, settings.job.checkpoint.keep)
        self._memory = HostMemory()
        self.versions = Versions(self._copy)
        self._reference: PackedScorer | None = None
        if (path := settings.reference_path) is not None:
            self._reference = partial(packed_scores, self._load_network(path).requires_grad_(False))
        self._half_done = False
        self._aside = Aside(settings.set_aside_path)
        self._live: _Live | None = None
        self.restore("")

    @property
    def version(self) -> WeightVersion:
        """Steps done."""
        return self.versions.current

    def named_tensors(self) -> dict[str, Tensor]:
        """What is published: the live weights by name, as the network names them; tied ones once. With LoRA the
        adapters alone."""
        return named_weights(self.network) if self._lora is None else adapter_tensors(self.network)

    def train_step(self, batch: Batch) -> StepResult:
        """One step on version `batch.step`. What cannot be trained on is set aside; a batch of which nothing is left,
        or without a sampled token, leaves the weights as they are."""
        self._check_whole()
        check_step(batch.step, self.version)
        began = time.perf_counter()
        step = Step(batch, self.settings, self._aside, vocab_size=self.network.config.vocab_size)
        # From here on `publish` reads this copy, and never the weights that are about to change.
        self.versions.of(self.version)
        lr = learning_rate(self.settings, batch.step)
        try:
            while shares := step.shares(0):
                for report in self.updater.updates(batch.step, shares, lr, begin=not step.updates_made):
                    step.book([report])
        except BaseException:
            self.optimizer.zero()
            self._half_done = bool(step.updates_made)
            raise
        return step.result(self.versions.advance(), lr, time.perf_counter() - began)

    def publish(self, version: WeightVersion, store: PushTarget) -> WeightManifest:
        """Push the current or the previous version."""
        copy, probe = self.versions.of(version)
        return store.push(version, copy.whole(), probe)

    def save(self) -> str:
        """Write a checkpoint; returns its path."""
        self._check_whole()
        return str(self._checkpoints.write(self.version, self._fill))

    def restore(self, reference: str) -> WeightVersion:
        """Continue from a checkpoint, or from the initial weights where `reference` is empty."""
        version = saved_version(reference) if reference else 0
        path = Path(reference) if reference else self.settings.model_path
        self.versions.reset(version, self._let_go)
        forget_compiled()
        gc.collect()  # networks refer to themselves
        network = self._load_policy(path / MODEL_DIR if reference else None)
        compiled = compiles(self._train, network)
        run_layers(network, recompute=recomputed_layers(self._train, network), compile_=compiled)
        optimizer = MasterAdamW(network, self._train)
        if reference:
            saved = StoredTensors(optimizer_files(path))
            torch.set_rng_state(saved.pop(RNG))
            optimizer.load(saved)
            self._checkpoints.use(path)

        scorer = partial(packed_scores, network)
        updater = Updater(self.settings, scorer, self._reference, optimizer, self.device, self._hold_back)
        if compiled:
            updater.warm_up()

        def put_in_place() -> None:
            self._live = _Live(network, optimizer, updater)

        self.versions.reset(version, put_in_place)
        self._half_done = False
        return version

    def _let_go(self) -> None:
        self._live = None

    def _held(self) -> _Live:
        if self._live is None:
            raise TrainerError("the trainer holds no weights: a restore failed, or is under way; restore first")
        return self._live

    @property
    def network(self) -> PreTrainedModel:
        return self._held().network

    @property
    def optimizer(self) -> MasterAdamW:
        return self._held().optimizer

    @property
    def updater(self) -> Updater:
        return self._held().updater

    def _check_whole(self) -> None:
        self._held()
        if self._half_done:
            raise TrainerError(f"step {self.version} failed half-way, so the weights are of no version; restore first")

    def _load_policy(self, saved: Path | None) -> PreTrainedModel:
        """The network that is trained: as it was saved, or from the beginning."""
        if self._lora is None:
            return self._load_network(saved or self.settings.model_path)
        network = self._load_network(self.settings.model_path)
        add_adapters(network, self._lora, seed=self.settings.job.seed)
        if (folder := saved or self.settings.adapter_path) is not None:
            written, tensors = read_adapters(folder)
            if not same_shape(written, self._lora):
                raise JobError(f"{folder}: its adapters are {written}, and train.lora asks for {self._lora}")
            load_adapters_(network, tensors, folder)
        return network

    def _load_network(self, path: Path) -> PreTrainedModel:
        dtype = torch.bfloat16 if self._train.uses_bf16 else torch.float32
        return load_model(path, dtype, self.device)

    def _copy(self) -> tuple[HostCopy, Probe | None]:
        """The weights, and what they say of the probe: who loads them elsewhere can prove that it did."""
        return HostCopy.of(self.named_tensors(), self._memory), probe(self.network) if self.settings.probe else None

    def _hold_back(self) -> None:
        """The weights are about to change: not before they are copied."""
        self.versions.of(self.version)[0].hold_back()

    def _fill(self, folder: Path) -> None:
        """Write all of a checkpoint below `folder`."""
        model = folder / MODEL_DIR
        model.mkdir()
        copy_other_files(self.settings.model_path, model)
        if self._lora is None:
            self.network.save_pretrained(model)
        else:
            write_adapters(model, self.network, self._lora, str(self.settings.model_path.absolute()))
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.optimizer.tensors().items()}
        save_file(tensors | {RNG: torch.get_rng_state()}, folder / f"{OPTIMIZER}.safetensors")
        write_state(folder, self.version, bf16=self._train.uses_bf16)


class AsyncTrainer:
    """The `Trainer` port over a `SingleTrainer` and a store, in this process.

    One thread trains, saves and restores; another publishes, so that a push and the next step overlap.
    """

    def __init__(self, core: SingleTrainer, store: PushTarget) -> None:
        self._core = core
        self.store = store
        self._work, self._push = (
            ThreadPoolExecutor(1, thread_name_prefix=name, initializer=stay_on, initargs=(core.device,))
            for name in ("train", "publish")
        )

    async def train_step(self, batch: Batch) -> StepResult:
        with boundary(TrainerError, f"train step {batch.step}"):
            return await asyncio.get_running_loop().run_in_executor(self._work, self._core.train_step, batch)

    async def publish(self, version: WeightVersion) -> WeightManifest:
        with boundary(TrainerError, f"publish of version {version}"):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._push, self._core.publish, version, self.store)

    async def save(self) -> str:
        with boundary(TrainerError, "trainer save"):
            return await asyncio.get_running_loop().run_in_executor(self._work, self._core.save)

    async def restore(self, reference: str) -> WeightVersion:
        with boundary(TrainerError, f"trainer restore of {reference or 'the initial weights'}"):
            return await asyncio.get_running_loop().run_in_executor(self._work, self._core.restore, reference)

    def close(self) -> None:
        """Wait for what is under way, and end the threads."""
        self._work.shutdown()
        self._push.shutdown()
