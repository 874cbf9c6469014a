"""Filling a model: from safetensors, straight into its merged parameters, or with random weights."""

from __future__ import annotations

import logging
import re
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.data.memory_checks import check_fits
from nanovllm.errors import ConfigError, ModelError
from nanovllm.formats.checkpoint import StoredTensor, TensorReader, list_tensors, part_of, some_of
from nanovllm.formats.hub import is_gguf
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.linear_method import CheckpointTensor, Part, WeightSlot
from nanovllm.layers.module import Module
from nanovllm.layers.parallel import RankGroup
from nanovllm.models.fused_experts import split_experts, split_interleaved_experts
from nanovllm.models.hf_config import text_name
from nanovllm.models.mtp import MTP, MTPHead
from nanovllm.models.network_config import META, NetworkConfig
from nanovllm.ops.cpu_kernels import use_huge_pages

logger = logging.getLogger(__name__)

REMEDY = (
    "free memory, let the weights of some layers stream from host memory (weights_memory_bytes), or take a smaller "
    "model or dtype"
)
EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


def slots_of(modules: Iterable[Module]) -> Iterator[tuple[str, WeightSlot]]:
    """Of modules themselves, without what is below them."""
    return (slot for module in modules for slot in module.own_slots())


def fill_with_random_weights(modules: Iterable[Module], device: torch.device, seed: int) -> None:
    """Fill every parameter of parts of a network from `seed`: the same device, dtype and seed give the same weights.

    Matrices, and convolutions, are uniform with variance 1 / columns, so that a normalized input gives outputs of size
    1. Norm weights are within 0.1 of 1 in the form of a checkpoint, and biases within 0.1 of 0. Tensor-parallel ranks
    agree on what each of them holds whole; together they are another network than one rank would be.
    """
    generator = torch.Generator(device=device)
    for name, slot in slots_of(modules):
        generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        if slot.randomize is not None:
            slot.randomize(generator)
        elif len(slot.shape) > 1:
            bound = (3 / slot.shape[-1]) ** 0.5
            slot.view.uniform_(-bound, bound, generator=generator)
        else:
            centre = 0.0 if name.endswith("bias") else 1.0
            drawn = slot.view.new_empty(slot.shape)
            slot.write(drawn.uniform_(centre - 0.1, centre + 0.1, generator=generator))


# Buffers that Transformers saved until 4.3x. They are computed from the config instead.
BUFFERS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")


class LayersInTurn(Protocol):
    """Layers whose matrices are on the device one after the other while a model is loaded."""

    @property
    def layers(self) -> Sequence[int]:
        """Their indices, ascending."""
        ...

    @property
    def device_bytes(self) -> int:
        """What all weights take of the device when the model is loaded."""
        ...

    def built(self, layer: Module) -> None:
        """See `BuildContext.layer_built`."""
        ...

    def load(self, index: int) -> Sequence[Module]:
        """Give what streams of a layer memory of the device, to be filled and finished."""
        ...

    def keep(self, index: int) -> None:
        """The matrices of the layer are complete: they may leave the device."""
        ...

    def finish(self) -> None:
        """All of these layers are loaded."""
        ...


def load_model(
    model_dir: str | Path,
    network: NetworkConfig,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    free_bytes: int | None = None,
    group: RankGroup | None = None,
    in_turn: Callable[[CausalLM], LayersInTurn | None] = lambda model: None,
) -> CausalLM:
    """A model with its weights: those of `model_dir`, or drawn from `seed` if load_format is "dummy".

    model_dir: a directory, which "auto" and "safetensors" read, or a GGUF file, which "auto" and "gguf" read. It must
    hold exactly the tensors of the network, in their shapes. All headers are checked before any allocation. Then the
    tensors are copied one at a time, so that the host never holds a second copy of the weights. free_bytes: free memory
    of the device in bytes, if known. group: the ranks that share the model; each reads its own part of the checkpoint.
    in_turn: of the model without memory, which layers are on the device one after the other; None for none.
    Raises ModelError, which names the wrong tensors, and ConfigError for a load_format of other files, or weights
    that do not fit.
    """
    directory = Path(model_dir)
    if load_format == ("safetensors" if is_gguf(directory) else "gguf"):
        raise ConfigError(f"load_format={load_format!r}: {directory} has another format; leave it out.")
    declared = network.build(dtype, META, group)
    checkpoint = None
    if load_format != "dummy":
        checkpoint = _Checkpoint(directory, declared, says_so=group is None or group.rank == 0)
        checkpoint.check()
    layers = in_turn(declared)
    if free_bytes is not None:
        weights = declared.network.weight_bytes if layers is None else layers.device_bytes
        check_fits(f"model={str(model_dir)!r}: its weights take", weights, free_bytes, "the device has", REMEDY)
    model = network.build(dtype, device, group, None if layers is None else _built_of(layers))

    def fill(modules: Sequence[Module]) -> None:
        """Without what is below them."""
        for _, slot in slots_of(modules):
            use_huge_pages(slot.view)
        if checkpoint is None:
            fill_with_random_weights(modules, device, seed)
        else:
            checkpoint.fill(modules)

    others = list(model.modules())
    for index in () if layers is None else layers.layers:
        assert layers is not None
        in_turn_now = [module for part in layers.load(index) for module in part.modules()]
        fill(in_turn_now)
        for module in in_turn_now:
            module.finish_loading()
            others.remove(module)
        layers.keep(index)
    fill(others)
    if checkpoint is not None:
        checkpoint.check_unused(model)
    model.finish_loading()
    if layers is not None:
        layers.finish()
    return model


def _built_of(layers: LayersInTurn) -> Callable[[Module], None]:
    """`layers.built`, which does not keep the layers: each module keeps it, and they have the modules."""
    own = weakref.ref(layers)

    def built(layer: Module) -> None:
        found = own()
        if found is not None:
            found.built(layer)

    return built


def load_mtp_head(model_dir: str | Path, model: CausalLM, load_format: str = "auto", seed: int = 0) -> MTPHead:
    """The head for multi-token prediction of a model that `load_model` made of the same arguments.

    Raises ModelError if the files do not hold exactly its tensors.
    """
    head = MTPHead(model)
    directory = Path(model_dir)
    if load_format == "dummy":
        fill_with_random_weights(head.modules(), model.device, seed)
    else:
        stored = with_single_experts(_of_mtp_head(_list_tensors(directory)), head)
        tensors = dict(head.tensors())
        names = _stored_names(directory, head, tensors, stored)
        with closing(TensorReader()) as reader:
            _check(reader, tensors, names, stored)
            _fill(head.modules(), reader, tensors, names, stored)
    head.finish_loading()
    return head


def holds_mtp_head(model_dir: str | Path) -> bool:
    """Whether a directory or GGUF file has tensors of a head for multi-token prediction. Reads headers alone."""
    return bool(_of_mtp_head(_list_tensors(Path(model_dir))))


def _of_mtp_head(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    return {name: tensor for name, tensor in stored.items() if name.startswith(f"{MTP}.")}


class _Checkpoint:
    """The tensors of a checkpoint, of which those of the text model fill a network."""

    def __init__(self, directory: Path, declared: CausalLM, *, says_so: bool) -> None:
        """declared: the network on the meta device. Raises ModelError unless checkpoint and network match."""
        self._directory = directory
        self._declared = declared
        listed = _list_tensors(directory, says_so=says_so)
        stored = with_single_experts(_of_text_model(directory, listed, declared), declared)
        self._stored = _without_mtp_layers(directory, stored, declared, says_so=says_so)
        self._tensors = dict(declared.tensors())
        self._names = _stored_names(directory, declared, self._tensors, self._stored)

    def check(self) -> None:
        """Read the tensors that are only checked. Raises ModelError for values that cannot be used."""
        with closing(TensorReader()) as reader:
            _check(reader, self._tensors, self._names, self._stored)

    def fill(self, modules: Iterable[Module]) -> None:
        """Read the parameters of parts of the network. Raises ModelError for values that cannot be used."""
        with closing(TensorReader()) as reader:
            _fill(modules, reader, self._tensors, self._names, self._stored)

    def check_unused(self, model: CausalLM) -> None:
        """Compare tensors that fill nothing with the filled model. Raises ModelError if they differ."""
        with closing(TensorReader()) as reader:
            self._check_tied(reader, model)
            self._check_unused_biases(reader)

    def _check_unused_biases(self, reader: TensorReader) -> None:
        """Raise ModelError if a bias that the network does not have holds anything but zeros."""
        for name, tensor in self._stored.items():
            if name.endswith(".bias") and name not in self._tensors and bool(reader.read(name, tensor).any()):
                architecture = self._declared.architecture
                raise ModelError(f"{tensor.file}: {name} is not zero, but a {architecture} has no such bias.")

    def _check_tied(self, reader: TensorReader, model: CausalLM) -> None:
        """Raise ModelError if a tied checkpoint holds an output projection that differs from the embedding."""
        stored = self._stored
        if not (model.is_tied and EMBEDDING in stored and LM_HEAD in stored):
            return
        part = self._tensors[EMBEDDING].part(stored[LM_HEAD].shape)
        head = reader.read(LM_HEAD, stored[LM_HEAD], part)
        embedding = model.embedding.weight.dense
        if embedding is None or not torch.equal(head.to(model.dtype), embedding.cpu()):
            raise ModelError(
                f"{self._directory}: {LM_HEAD} differs from {EMBEDDING}, but the config says that they are tied; "
                "set tie_word_embeddings to false in config.json."
            )


def _fill(
    modules: Iterable[Module],
    reader: TensorReader,
    tensors: dict[str, CheckpointTensor],
    names: dict[str, str],
    stored: dict[str, StoredTensor],
) -> None:
    """Read the parameters of a network with these checkpoint tensors, or of a part of it. names: in the file, of those
    it holds. Raises ModelError."""
    # The largest first: what is read of a tensor should not come on top of all weights.
    for name, slot in sorted(slots_of(modules), key=lambda named: -named[1].view.nbytes):
        if name in names:
            stored_as = names[name]
            part = tensors[name].part(stored[stored_as].shape)
            _use(slot.write, reader, stored_as, stored[stored_as], part)


def _check(
    reader: TensorReader,
    tensors: dict[str, CheckpointTensor],
    names: dict[str, str],
    stored: dict[str, StoredTensor],
) -> None:
    """Read the tensors that are only checked. Raises ModelError."""
    for name, stored_as in names.items():
        if (check := tensors[name].check) is not None:
            _use(check, reader, stored_as, stored[stored_as])


def _list_tensors(model: Path, *, says_so: bool = False) -> dict[str, StoredTensor]:
    if not is_gguf(model):
        return list_tensors(model, says_so=says_so)
    from nanovllm.formats.gguf.model import list_tensors as list_gguf_tensors  # numpy

    return list_gguf_tensors(model)


def _of_text_model(directory: Path, stored: dict[str, StoredTensor], model: CausalLM) -> dict[str, StoredTensor]:
    """The tensors of the text model under its names. Those of images, and what else no text needs, are left out with a
    line in the log."""
    left_out = model.left_out
    is_whole = bool(model.wholes)
    names = {name: None if name.startswith(left_out) else text_name(name) if is_whole else name for name in stored}
    unread = [name for name, new in names.items() if new is None]
    if unread:
        logger.info("%s: tensors that text does not need are left out (%s)", directory, some_of(unread))
    return {
        new: stored[name] if new == name else part_of(stored[name], name, slice(None))
        for name, new in names.items()
        if new is not None
    }


def _without_mtp_layers(
    directory: Path, stored: dict[str, StoredTensor], model: CausalLM, *, says_so: bool
) -> dict[str, StoredTensor]:
    """The tensors without those of layers for multi-token prediction, which a line names if there are any."""
    layers = range(len(model.layers), len(model.layers) + model.num_mtp_layers)
    prefixes = tuple(f"model.layers.{index}." for index in layers)
    kept = {name: tensor for name, tensor in stored.items() if not name.startswith(prefixes)}
    if says_so and len(kept) < len(stored):
        few = len(stored) - len(kept)
        logger.warning("%s: %d tensors of layers for multi-token prediction are not read", directory, few)
    return kept


def _use(use: Callable[[Tensor], None], reader: TensorReader, name: str, stored: StoredTensor, part: Part = ()) -> None:
    """Call a function with a part of a file's tensor. Raises ModelError for values that cannot be used."""
    tensor = reader.read(name, stored, part)
    try:
        use(tensor)
    except ModelError as error:
        raise ModelError(f"{stored.file}: {name}: {error}") from None


def _stored_names(
    directory: Path, model: CausalLM, tensors: dict[str, CheckpointTensor], stored: dict[str, StoredTensor]
) -> dict[str, str]:
    """The file's name of each of the network's tensors that it holds. Raises ModelError unless checkpoint and network
    match."""
    names = {name: name for name, tensor in tensors.items() if tensor.required or name in stored}
    if model.is_tied and EMBEDDING not in stored and LM_HEAD in stored:
        names[EMBEDDING] = LM_HEAD  # some tools keep only the alphabetically first name of a tied tensor
    missing = [name for name in names.values() if name not in stored]
    if missing:
        raise ModelError(f"{directory} lacks tensors of a {model.architecture} ({some_of(missing)}).")
    expected = {stored_name: tensors[name] for name, stored_name in names.items()}
    unexpected = [name for name in stored if name not in expected and not _harmless(name, model)]
    if unexpected:
        raise ModelError(
            f"{directory} holds tensors that a {model.architecture} does not have ({some_of(unexpected)})."
        )
    _check_headers(directory, stored, expected)
    return names


def _harmless(name: str, model: CausalLM) -> bool:
    """Whether the checkpoint may hold a tensor that is not used: an old buffer, a tied output projection, or a bias.

    Some tools write a bias of zeros for every quantized matrix; `_Checkpoint.fill` looks at them.
    """
    if model.build.method is not None and name.endswith(".bias"):
        return any(name == f"{module}.bias" for module, _, _ in model.matrices())
    return bool(BUFFERS.fullmatch(name)) or (model.is_tied and name == LM_HEAD) or model.ignores(name)


def _check_headers(directory: Path, stored: dict[str, StoredTensor], expected: dict[str, CheckpointTensor]) -> None:
    misshapen = [
        f"{name} expected {list(tensor.shape)}, found {list(stored[name].shape)}"
        for name, tensor in expected.items()
        if stored[name].shape not in (tensor.shape, *tensor.other_shapes)
    ]
    if misshapen:
        raise ModelError(f"{directory} holds tensors of shapes its config does not give ({some_of(misshapen)}).")
    unreadable = [name for name, tensor in expected.items() if stored[name].dtype not in tensor.dtypes]
    if unreadable:
        named = some_of(f"{name} {stored[name].dtype}" for name in unreadable)
        raise ModelError(
            f"{directory} holds tensors in formats that are not read ({named}); "
            f"read are {', '.join(expected[unreadable[0]].dtypes)}."
        )


def with_single_experts(stored: dict[str, StoredTensor], model: CausalLM) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, with fused ones as a tensor for each expert's projection."""
    single = dict(stored)
    for experts in model.experts:
        (split_interleaved_experts if experts.interleaved else split_experts)(single, experts)
    return single
