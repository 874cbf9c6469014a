"""Filling a decoder: from safetensors, straight into its merged parameters, or with random weights."""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from nanovllm.data.memory_checks import check_fits
from nanovllm.errors import ConfigError, ModelError
from nanovllm.formats.checkpoint import StoredTensor, TensorReader, list_tensors, part_of, some_of
from nanovllm.formats.hub import is_gguf
from nanovllm.layers.linear_method import CheckpointTensor
from nanovllm.layers.parallel import RankGroup
from nanovllm.layers.sharding import Part
from nanovllm.models.create import create_decoder
from nanovllm.models.decoder import Decoder
from nanovllm.models.families import FAMILIES, MTP
from nanovllm.models.hf_config import TEXT_ARCHITECTURES, text_name
from nanovllm.models.interleaved_experts import with_single_interleaved
from nanovllm.models.mtp import MTPHead
from nanovllm.models.mtp_spec import mtp_tensors
from nanovllm.models.spec import EMBEDDING, LM_HEAD, DecoderSpec
from nanovllm.ops.cpu_kernels import use_huge_pages

logger = logging.getLogger(__name__)


def fill_with_random_weights(decoder: Decoder, seed: int) -> None:
    """Fill every parameter from `seed`: the same device, dtype and seed give the same weights.

    Matrices, and convolutions, are uniform with variance 1 / columns, so that a normalized input gives outputs of size
    1. Norm weights are within 0.1 of 1 in the form of a checkpoint, and biases within 0.1 of 0. Tensor-parallel ranks
    agree on what each of them holds whole; together they are another network than one rank would be.
    """
    generator = torch.Generator(device=decoder.device).manual_seed(seed)
    for name, slot in decoder.slots():
        if decoder.group is not None:
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


# Checkpoints of Gemma 4 have them for layers that read the keys and values of another one, too.
UNUSED_KV = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight")
# Buffers that Transformers saved until 4.3x. They are computed from the config instead.
BUFFERS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")


def load_model(
    model_dir: str | Path,
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    free_bytes: int | None = None,
    group: RankGroup | None = None,
) -> Decoder:
    """A decoder with its weights: those of `model_dir`, or drawn from `seed` if load_format is "dummy".

    model_dir: a directory, which "auto" and "safetensors" read, or a GGUF file, which "auto" and "gguf" read. It must
    hold exactly the tensors of the network, in their shapes. All headers are checked before any allocation. Then the
    tensors are copied one at a time, so that the host never holds a second copy of the weights. free_bytes: free memory
    of the device in bytes, if known. group: the ranks that share the model; each reads its own part of the checkpoint.
    Raises ModelError, which names the wrong tensors, and ConfigError for a load_format of other files, or weights
    that do not fit.
    """
    directory = Path(model_dir)
    if load_format == ("safetensors" if is_gguf(directory) else "gguf"):
        raise ConfigError(f"load_format={load_format!r}: {directory} has another format; leave it out.")
    stored: dict[str, StoredTensor] = {}
    if load_format != "dummy":
        says_so = group is None or group.rank == 0
        listed = _list_tensors(directory, says_so=says_so)
        stored = with_single_experts(_of_text_model(directory, listed, spec), spec)
        stored = _without_mtp_layers(directory, stored, spec, says_so=says_so)
    tensors = dict(spec.tensors())
    names = {} if load_format == "dummy" else _stored_names(directory, spec, tensors, stored)
    own = spec if group is None else spec.of_rank(group.rank, group.size)
    if free_bytes is not None:
        where = "the device has"
        remedy = "free memory, or take a smaller model or dtype"
        check_fits(
            f"model={str(model_dir)!r}: its weights take", own.weight_bytes(dtype.itemsize), free_bytes, where, remedy
        )
    decoder = create_decoder(own, dtype, device, group)
    for _, slot in decoder.slots():
        use_huge_pages(slot.view)
    if load_format == "dummy":
        fill_with_random_weights(decoder, seed)
    else:
        with closing(TensorReader()) as reader:
            _fill(decoder, reader, tensors, names, stored)
            _check_tied(directory, reader, spec, stored, decoder)
            _check_unused_biases(reader, spec, stored)
    decoder.finish_loading()
    return decoder


def load_mtp_head(model_dir: str | Path, decoder: Decoder, load_format: str = "auto", seed: int = 0) -> MTPHead:
    """The head for multi-token prediction of a decoder that `load_model` made of the same arguments.

    Raises ModelError if the files do not hold exactly its tensors.
    """
    head = MTPHead(decoder)
    directory = Path(model_dir)
    if load_format == "dummy":
        fill_with_random_weights(head, seed)
    else:
        stored = with_single_experts(_of_mtp_head(_list_tensors(directory)), head.spec)
        tensors = dict(mtp_tensors(head.spec))
        names = _stored_names(directory, head.spec, tensors, stored)
        with closing(TensorReader()) as reader:
            _fill(head, reader, tensors, names, stored)
    head.finish_loading()
    return head


def holds_mtp_head(model_dir: str | Path) -> bool:
    """Whether a directory or GGUF file has tensors of a head for multi-token prediction. Reads headers alone."""
    return bool(_of_mtp_head(_list_tensors(Path(model_dir))))


def _of_mtp_head(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    return {name: tensor for name, tensor in stored.items() if name.startswith(MTP)}


def _fill(
    decoder: Decoder,
    reader: TensorReader,
    tensors: dict[str, CheckpointTensor],
    names: dict[str, str],
    stored: dict[str, StoredTensor],
) -> None:
    """Read the parameters of a decoder, which has these checkpoint tensors. names: in the file, of those it holds.

    First the tensors that are only checked. Raises ModelError.
    """
    for name, stored_as in names.items():
        if (check := tensors[name].check) is not None:
            _use(check, reader, stored_as, stored[stored_as])
    # The largest first: what is read of a tensor should not come on top of all weights.
    for name, slot in sorted(decoder.slots(), key=lambda named: -named[1].view.nbytes):
        if name in names:
            stored_as = names[name]
            part = _part(decoder.spec, stored_as, tensors[name], stored[stored_as])
            _use(slot.write, reader, stored_as, stored[stored_as], part)


def _list_tensors(model: Path, *, says_so: bool = False) -> dict[str, StoredTensor]:
    if not is_gguf(model):
        return list_tensors(model, says_so=says_so)
    from nanovllm.formats.gguf.model import list_tensors as list_gguf_tensors  # numpy

    return list_gguf_tensors(model)


def _of_text_model(directory: Path, stored: dict[str, StoredTensor], spec: DecoderSpec) -> dict[str, StoredTensor]:
    """The tensors of the text model under its names. Those of images, and what else no text needs, are left out with a
    line in the log."""
    left_out = FAMILIES[spec.architecture].left_out
    is_whole = spec.architecture in TEXT_ARCHITECTURES
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
    model: Path, stored: dict[str, StoredTensor], spec: DecoderSpec, *, says_so: bool
) -> dict[str, StoredTensor]:
    """The tensors without those of layers for multi-token prediction, which a line names if there are any."""
    layers = range(spec.num_layers, spec.num_layers + spec.num_mtp_layers)
    prefixes = tuple(f"model.layers.{index}." for index in layers)
    kept = {name: tensor for name, tensor in stored.items() if not name.startswith(prefixes)}
    if says_so and len(kept) < len(stored):
        few = len(stored) - len(kept)
        logger.warning("%s: %d tensors of layers for multi-token prediction are not read", model, few)
    return kept


def _part(spec: DecoderSpec, name: str, tensor: CheckpointTensor, stored: StoredTensor) -> Part:
    """What a rank with this spec holds of a tensor of the checkpoint."""
    module = name.rpartition(".")[0]
    sharding = spec.sharding_of(module)
    return () if sharding is None else sharding.part(module, tensor.axes, stored.shape)


def _use(use: Callable[[Tensor], None], reader: TensorReader, name: str, stored: StoredTensor, part: Part = ()) -> None:
    """Call a function with a part of a file's tensor. Raises ModelError for values that cannot be used."""
    tensor = reader.read(name, stored, part)
    try:
        use(tensor)
    except ModelError as error:
        raise ModelError(f"{stored.file}: {name}: {error}") from None


def _stored_names(
    directory: Path, spec: DecoderSpec, tensors: dict[str, CheckpointTensor], stored: dict[str, StoredTensor]
) -> dict[str, str]:
    """The file's name of each of the network's tensors that it holds. Raises ModelError unless checkpoint and network
    match."""
    names = {name: name for name, tensor in tensors.items() if tensor.required or name in stored}
    if spec.tie_word_embeddings and EMBEDDING not in stored and LM_HEAD in stored:
        names[EMBEDDING] = LM_HEAD  # some tools keep only the alphabetically first name of a tied tensor
    missing = [name for name in names.values() if name not in stored]
    if missing:
        raise ModelError(f"{directory} lacks tensors of a {spec.architecture} ({some_of(missing)}).")
    expected = {stored_name: tensors[name] for name, stored_name in names.items()}
    unexpected = [name for name in stored if name not in expected and not _harmless(name, spec)]
    if unexpected:
        raise ModelError(f"{directory} holds tensors that a {spec.architecture} does not have ({some_of(unexpected)}).")
    _check_headers(directory, stored, expected)
    return names


def _harmless(name: str, spec: DecoderSpec) -> bool:
    """Whether the checkpoint may hold a tensor that is not used: an old buffer, a tied output projection, or a bias.

    Some tools write a bias of zeros for every quantized matrix; `_check_unused_biases` looks at them.
    """
    if spec.quantization is not None and name.endswith(".bias"):
        return any(name == f"{module}.bias" for module, _, _ in spec.matrices())
    if (unused := UNUSED_KV.fullmatch(name)) is not None and spec.gemma4 is not None:
        return spec.gemma4.num_owners <= int(unused[1]) < spec.num_layers
    return bool(BUFFERS.fullmatch(name)) or (spec.tie_word_embeddings and name == LM_HEAD)


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


def _check_unused_biases(reader: TensorReader, spec: DecoderSpec, stored: dict[str, StoredTensor]) -> None:
    """Raise ModelError if a bias that the network does not have holds anything but zeros."""
    used = dict(spec.tensors())
    for name, tensor in stored.items():
        if name.endswith(".bias") and name not in used and bool(reader.read(name, tensor).any()):
            raise ModelError(f"{tensor.file}: {name} is not zero, but a {spec.architecture} has no such bias.")


def _check_tied(
    directory: Path, reader: TensorReader, spec: DecoderSpec, stored: dict[str, StoredTensor], decoder: Decoder
) -> None:
    """Raise ModelError if a tied checkpoint holds an output projection that differs from the embedding."""
    if not (spec.tie_word_embeddings and EMBEDDING in stored and LM_HEAD in stored):
        return
    part = _part(decoder.spec, LM_HEAD, CheckpointTensor(()), stored[LM_HEAD])
    head = reader.read(LM_HEAD, stored[LM_HEAD], part)
    embedding = decoder.embedding.dense
    if embedding is None or not torch.equal(head.to(decoder.dtype), embedding.cpu()):
        raise ModelError(
            f"{directory}: {LM_HEAD} differs from {EMBEDDING}, but the config says that they are tied; "
            "set tie_word_embeddings to false in config.json."
        )


def with_single_experts(stored: dict[str, StoredTensor], spec: DecoderSpec) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, with fused ones as a tensor for each expert's projection.

    Layer N has `model.layers.N.mlp.experts.gate_up_proj` [experts, 2 * intermediate, hidden] and `down_proj` [experts,
    hidden, intermediate]; its block is named mlp for every family, but where layers have an MLP besides. Raises
    ModelError if a fused tensor has another shape.
    """
    single = dict(stored)
    experts = spec.experts
    if experts is None:
        return single
    if experts.interleaved:
        return with_single_interleaved(single, spec, experts)
    hidden = spec.hidden_size
    inner = experts.intermediate_size
    count = experts.num_experts
    for layer in (index for index in range(spec.num_layers) if experts.layers[index]):
        prefix = experts.prefix(layer) if experts.beside_mlp else f"{spec.root}.layers.{layer}.mlp."
        if f"{prefix}experts.gate_up_proj" not in stored:
            continue
        gate_up = f"{prefix}experts.gate_up_proj"
        down = f"{prefix}experts.down_proj"
        gate_up_tensor = _take(single, gate_up, (count, 2 * inner, hidden))
        down_tensor = _take(single, down, (count, hidden, inner))
        for name, _, _ in experts.routing_tensors(layer, hidden):
            other = name.replace(experts.prefix(layer), prefix, 1)
            if other in single:
                single[name] = part_of(single.pop(other), other, slice(None))
        for expert in range(count):
            modules = experts.expert(layer, expert)
            single[f"{modules[0]}.weight"] = part_of(gate_up_tensor, gate_up, expert, slice(0, inner))
            single[f"{modules[1]}.weight"] = part_of(gate_up_tensor, gate_up, expert, slice(inner, 2 * inner))
            single[f"{modules[2]}.weight"] = part_of(down_tensor, down, expert, slice(None))
    return single


def _take(stored: dict[str, StoredTensor], name: str, shape: tuple[int, ...]) -> StoredTensor:
    """Remove a fused tensor from those stored, and return it."""
    tensor = stored.pop(name, None)
    if tensor is None:
        raise ModelError(f"{name} is missing, which holds experts of this layer; copy the checkpoint again.")
    if tensor.shape != shape:
        raise ModelError(
            f"{tensor.file} holds a tensor of a shape its config does not give: {name} expected {list(shape)}, "
            f"found {list(tensor.shape)}."
        )
    return tensor
