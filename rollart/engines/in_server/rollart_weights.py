"""Gives a vLLM server new weights from files of its host, without standing still while they are read.

Runs inside vLLM's workers (`--worker-extension-cls`) and imports nothing of ours. `rollart_stage` begins: a thread
makes a twin of the model, whose layers share all but their weights with it, loads the files into that as vLLM loads any
checkpoint (fused layers, experts, this rank's part), and prepares them for computing as vLLM does. `rollart_load` gives
the twin's weights to the model. So a layer is prepared from whole weights each time: on a CPU vLLM's own reload leaves
the packed output layer of tied embeddings, and the packed experts of a mixture, as they were.

Where layers cannot change their tensors (a GPU: graphs hold their addresses, and there is no room for two of each), the
files are mapped ahead and loaded into the model in place, by vLLM's own reload.
"""

import copy
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.platforms import current_platform

OWN = frozenset({"_parameters", "_buffers", "_modules", "quant_method"})
"""Attributes of a twin that are its own from the beginning."""
PROCESSED = "_already_called_process_weights_after_loading"
"""Said by layers that were prepared once, and then pass over it."""


class RollartWeights:
    """What vLLM's worker class is given beside its own methods."""

    _rollart_staged: "StagedVersion | None" = None

    def rollart_stage(self, files: list[str], version: int) -> None:
        """Begin to make a version ready. Returns at once."""
        runner = self.model_runner  # type: ignore[attr-defined]
        changeable = current_platform.is_cpu() and runner.model_config.enforce_eager
        before, self._rollart_staged = self._rollart_staged, None
        self._rollart_staged = StagedVersion(runner.get_model(), files, version, before=before, twin=changeable)

    def rollart_staged(self, version: int) -> str | None:
        """None while it is under way; "" when it is ready; or what went wrong."""
        staged = self._rollart_staged
        if staged is None or staged.version != version:
            return f"version {version} is not staged here"
        return staged.outcome()

    def rollart_load(self, version: int) -> str:
        """Compute with a staged version from now on. Returns what went wrong, or ""; waits where it is not ready."""
        if (staged := self._rollart_staged) is not None:
            staged.wait()
        if wrong := self.rollart_staged(version):
            return wrong
        assert staged is not None
        self._rollart_staged = None
        runner = self.model_runner  # type: ignore[attr-defined]
        if staged.pairs:
            take_over(staged.pairs)
        else:
            runner.reload_weights(weights_iterator=iter(staged.tensors))
        return ""

    def rollart_sampled(self) -> dict[str, int]:
        """How many tokens each request in flight has by now. Asked while nothing is computed."""
        requests = self.model_runner.requests  # type: ignore[attr-defined]
        return {name: len(request.output_token_ids) for name, request in requests.items()}


class StagedVersion:
    """One version on its way. A thread reads the files."""

    def __init__(
        self, model: nn.Module, files: list[str], version: int, *, before: "StagedVersion | None", twin: bool
    ) -> None:
        """`before`: another version, which is not wanted any more."""
        self.version = version
        self.pairs: list[Pair] = []
        self.tensors: list[tuple[str, Tensor]] = []
        self._failure = ""
        self._thread = threading.Thread(
            target=self._run, args=(model, files, before, twin), name="rollart-stage", daemon=True
        )
        self._thread.start()

    def outcome(self) -> str | None:
        return None if self._thread.is_alive() else self._failure

    def wait(self) -> None:
        self._thread.join()

    @torch.inference_mode()
    def _run(self, model: nn.Module, files: list[str], before: "StagedVersion | None", twin: bool) -> None:
        if before is not None:
            before.wait()
            before.pairs = []
        try:
            tensors = list(read(files))
            if twin:
                pairs = twins_of(model)
                load(pairs, tensors)
                self.pairs = pairs
            else:
                self.tensors = tensors
        except Exception as error:  # the boundary of the thread: who asks for the outcome hears it
            self._failure = f"version {self.version} could not be staged: {type(error).__name__}: {error}"


def read(files: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors as views of the files."""
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                yield name, opened.get_tensor(name)


class Pair(NamedTuple):
    """A layer that computes, its twin, and what the twin was copied from."""

    layer: nn.Module
    twin: nn.Module
    before: dict[str, object]


def twins_of(model: nn.Module) -> list[Pair]:
    """A twin for each layer, the model's own first: with tensors of its own in the shapes of a checkpoint, not filled
    yet. Tensors that layers share are shared by their twins."""
    pairs: dict[int, Pair] = {}
    made: dict[int, Any] = {}

    def twin(layer: nn.Module) -> nn.Module:
        if id(layer) not in pairs:
            own, before = copy.copy(layer), dict(layer.__dict__)
            pairs[id(layer)] = Pair(layer, own, before)
            own.__dict__ |= {"_parameters": {}, "_buffers": dict(layer._buffers)}
            own.__dict__["_modules"] = {name: child and twin(child) for name, child in layer._modules.items()}
            own.__dict__.pop(PROCESSED, None)
            parameters = {**layer._parameters, **get_layerwise_info(layer).restore_metadata[0]}
            own._parameters |= {
                name: like if like is None else tensor(like, layer, name) for name, like in parameters.items()
            }
        return pairs[id(layer)].twin

    def tensor(like: Tensor, layer: nn.Module, name: str) -> Any:
        live = layer._parameters.get(name)
        fresh: Any = restore_layer_refs(materialize_meta_tensor(like), pairs[id(layer)].twin)
        fresh.weight_loader = _get_original_loader(fresh)  # vLLM's own reload leaves another, which keeps what it gets
        return fresh if live is None else made.setdefault(id(live), fresh)

    twin(model)
    return list(pairs.values())


def load(pairs: list[Pair], tensors: list[tuple[str, Tensor]]) -> None:
    """Fill the twins as vLLM fills a model at its start. RuntimeError where some weight was not given."""
    model = pairs[0].twin
    loaded = model.load_weights(iter(tensors))  # type: ignore[operator]
    if loaded is not None and (missing := {name for name, _ in model.named_parameters()} - set(loaded)):
        raise RuntimeError(f"{len(missing)} weights are not in the files, the first is {min(missing)}")
    for _, twin, _ in pairs:
        method = getattr(twin, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            twin.quant_method = method = copy.copy(method)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None  # or it takes the experts for packed already
            method.process_weights_after_loading(twin)


def take_over(pairs: list[Pair]) -> None:
    """Let the layers compute with what their twins have."""
    for layer, twin, before in pairs:
        layer._parameters.clear()
        layer._parameters.update(twin._parameters)
        for name, value in twin.__dict__.items():
            if name not in OWN and before.get(name) is not value:
                layer.__dict__[name] = value
