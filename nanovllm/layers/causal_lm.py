"""A decoder-only language model: embedding, layers, final norm and output projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from nanovllm.data.network import KVLayer, MatrixShape, Network, WeightSizes
from nanovllm.layers.attention import Attention
from nanovllm.layers.build_context import BuildContext, Split
from nanovllm.layers.decoder_layer import DecoderLayer
from nanovllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.experts import Experts
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.layers.gated_delta import GatedDelta
from nanovllm.layers.layer_inputs import LayerInputs, row_parts
from nanovllm.layers.module import Module, Weights
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.parallel import MetaRanks
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.layers.row_limits import CPU_CHUNK_ROWS, DEVICE_CHUNK_ROWS
from nanovllm.ops.row_kernels import kernels_on, widened

META = torch.device("meta")


class LayerWeights(Protocol):
    """Brings the matrices of layers that do not stay on the device."""

    streamed_bytes: int  # of all these layers
    streamed: Sequence[int]  # these layers, ascending

    @property
    def loaded_bytes(self) -> int:
        """Copied to the device so far."""
        ...

    @property
    def read_bytes(self) -> int:
        """Read from disk so far."""
        ...

    def before_layer(self, index: int, rows: int) -> None:
        """The matrices of the layer are on the device from now on, until those of another layer are asked for.

        rows: that are computed. Of few the experts are asked for by the layer, see `layers.experts.ExpertLoads`. The
        same layer may be asked for again, with other rows.
        """
        ...

    def close(self) -> None:
        """End reads from disk, and free the space there. Safe to call twice."""
        ...

    def is_recorded(self, rows: int) -> bool:
        """Whether the next pass, of so many rows, has all matrices where kernels read them that a graph has recorded.

        Experts may be left out: see `layers.experts.HostPart`.
        """
        ...


class CausalLM(Module):
    """The base of all model classes, whose names are the architectures of config.json.

    A model file makes the layers, and says in class attributes what the architecture is called and does not compute.
    """

    model_types: ClassVar[tuple[str, ...]]  # what configs have as model_type, Transformers' first
    wholes: ClassVar[tuple[str, ...]] = ()  # architectures of larger models, for images too, whose text model it is
    # Fields of the config of which single values are computed.
    computed: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({})
    activation_field: ClassVar[str] = "hidden_act"  # the field that names the activation
    default_dtype: ClassVar[str] = "float32"  # of a checkpoint whose config names none
    left_out: ClassVar[tuple[str, ...]] = ()  # what the names of tensors begin with that no text needs
    has_mtp_head: ClassVar[bool] = False  # whether checkpoints may have a head for multi-token prediction
    extends_by_yarn: ClassVar[bool] = False  # whether the authors document YaRN for longer sequences
    has_heads_by_layer: ClassVar[bool] = False  # whether layers may have heads of several sizes

    def __init__(
        self,
        config: Any,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        rope: RotaryEmbedding,
        build: BuildContext,
        *,
        embedding_scale: float = 1.0,
        tables: tuple[VocabParallelEmbedding, VocabParallelEmbedding] | None = None,
    ) -> None:
        """config: Transformers' object; rope: of the layers, of full attention if they differ.

        embedding_scale: rounded to the dtype, multiplies the embedding, and not the tied output projection. tables: the
        embedding and the output projection, if another model's are taken.
        """
        self.build = build
        self.config = config
        self.layer_weights: LayerWeights | None = None  # None: those of all layers stay on the device
        self.has_layer_inputs = False  # whether layers read more of a pass than the residual stream
        self.vocab_size = config.vocab_size
        self.is_tied: bool = getattr(config, "tie_word_embeddings", False)
        self.num_mtp_layers = 0  # behind the last layer in a checkpoint, for multi-token prediction: not read
        hidden = config.hidden_size
        units = [build.units(name, self.vocab_size, hidden)[0] for name in ("model.embed_tokens", "lm_head")]
        vocab = build.splits(self.vocab_size, "vocab", units[: 2 - self.is_tied])
        self._vocab_widths = [part.size for part in vocab]
        own = vocab[0 if build.group is None else build.group.rank]
        self.embedding, lm_head = self._make_tables(own, hidden) if tables is None else tables
        self.layers = list(layers)
        self.norm = norm
        self.lm_head = lm_head
        self.dtype = build.dtype
        self.device = build.device
        self.group = build.group
        self.chunk_rows = CPU_CHUNK_ROWS if build.device.type == "cpu" else DEVICE_CHUNK_ROWS
        self.rope = rope
        self._max_positions = config.max_position_embeddings
        self._kernels = kernels_on(build.device, build.dtype)
        self.embedding_scale = torch.tensor(embedding_scale).to(build.dtype).item()
        self._is_recurrent = bool(self.recurrences)
        for number, attention in enumerate(self.attending):
            attention.kv_layer = number

    def _make_tables(self, vocab: Split, hidden: int) -> tuple[VocabParallelEmbedding, VocabParallelEmbedding]:
        """The embedding and the output projection, which are one if they are tied."""
        embedding = VocabParallelEmbedding(vocab, hidden, "embed_tokens", self.build.at("model"))
        return embedding, embedding if self.is_tied else ParallelLMHead(vocab, hidden, "lm_head", self.build)

    # ---- a pass

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Hidden states after the final norm: int64 [tokens] -> [tokens, hidden] in the model's dtype.

        The KV cache gets contiguous q [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim]. Apart from
        attention and recurrent layers, a row depends only on its own token.
        """
        x = self.embed(input_ids)
        self.forward_layers_(range(len(self.layers)), x, self.inputs(x, ctx))
        return self.normalize_(x)

    def layer(self, index: int, rows: int) -> DecoderLayer:
        """A layer, with what so many rows read of it on the device until another one is asked for."""
        if self.layer_weights is not None:
            self.layer_weights.before_layer(index, rows)
        return self.layers[index]

    def embed(self, input_ids: Tensor) -> Tensor:
        """The residual stream before the first layer: int64 [tokens] -> [tokens, hidden]."""
        x = self.embedding.rows(input_ids)
        return x if self.embedding_scale == 1.0 else x.mul_(self.embedding_scale)

    def inputs(self, x: Tensor, ctx: ForwardContext) -> LayerInputs:
        """What layers share in a pass of x [tokens, hidden]."""
        return LayerInputs(x, ctx, self.chunk_rows, is_recurrent=self._is_recurrent)

    def forward_layers_(self, indices: range, x: Tensor, inputs: LayerInputs) -> None:
        """Take the residual stream x [tokens, hidden] through some layers, in place."""
        for index in indices:
            self.layer(index, x.shape[0]).forward_(x, inputs)

    def normalize_(self, x: Tensor) -> Tensor:
        """The final norm, in place: [tokens, hidden]."""
        for (rows,) in row_parts(self.chunk_rows, x):
            self.norm.normalize_(rows)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> float32 [rows, vocab]. Called only for rows that sample a token.

        Ranks other than the first contribute their part of the vocabulary, and get logits of no row.
        """
        return widened(self.lm_head.logits(hidden, self._vocab_widths))

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor besides those of the network."""
        return False

    def on_meta(self) -> CausalLM:
        """The same model without memory, to count what a pass takes."""
        group = self.group and MetaRanks(self.group.rank, self.group.size)
        make: Callable[[Any, BuildContext], CausalLM] = type(self)
        return make(self.config, replace(self.build, device=META, group=group, layer_built=None))

    def one_of_each_kind(self) -> CausalLM:
        """The model without memory, with the first layer of each kind, which take different memory in a pass.

        All but the last run once more, when the others have taken what they keep to the end of the pass.
        """
        twin = self.on_meta()
        twin.chunk_rows = self.chunk_rows
        kinds = list({_kind(layer): layer for layer in reversed(twin.layers)}.values())[::-1]
        twin.layers = kinds + kinds[:-1]
        for module in twin.modules():
            tuple(module.own_weights())  # experts make theirs when they are asked for: a pass is to make none
        return twin

    def mtp_layer(self, build: BuildContext) -> DecoderLayer:
        """The layer of a head for multi-token prediction, for a model that says `has_mtp_head`."""
        raise NotImplementedError

    # ---- what the engine asks of it

    @property
    def architecture(self) -> str:
        """The name of the architecture, as config.json has it."""
        return type(self).__name__

    @property
    def has_logits(self) -> bool:
        """Whether `compute_logits` gives the logits to this rank, which then samples."""
        return self.build.is_first_rank

    @property
    def is_recordable(self) -> bool:
        """Whether a CUDA graph can record a pass of few rows.

        Where weights stream each rank may have another way to compute a layer, so that it would replay other steps.
        """
        is_one_way = self.layer_weights is None or self.group is None
        return is_one_way and all(layer.is_recordable for layer in self.layers)

    @property
    def attending(self) -> Sequence[Attention]:
        """The layers with attention, in order, which is how the KV cache counts them."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)]

    @property
    def recurrences(self) -> Sequence[GatedDelta]:
        """Of each recurrent layer, in order."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDelta)]

    @property
    def experts(self) -> Sequence[Experts]:
        """Of each layer that has experts, in order."""
        return [child for layer in self.layers for child in layer.children() if isinstance(child, Experts)]

    @property
    def sinks(self) -> tuple[Tensor, ...]:
        """Of each layer, fp32 [heads]; () if attention has none."""
        return tuple(attention.sinks for attention in self.attending if attention.sinks is not None)

    @property
    def max_model_len(self) -> int:
        """The longest sequence, in tokens, that the checkpoint's positions support.

        linear and dynamic RoPE: `factor` times max_position_embeddings, as Transformers documents `factor`. yarn:
        `factor` times the trained length, as in Qwen's model cards, or max_position_embeddings if that is more.
        default, llama3 and longrope, and Gemma 3's linear RoPE: max_position_embeddings.
        """
        rope = self.rope.rope
        if rope.kind in ("linear", "dynamic", "yarn"):
            return max(self._max_positions, int((rope.original_max_position or self._max_positions) * rope.factor))
        return self._max_positions

    @property
    def yarn_positions(self) -> int | None:
        """The trained length in tokens, which YaRN extends fourfold; None where the authors document no YaRN.

        Qwen's model cards give factor 4 of 32,768. Qwen3's 40,960 positions are those and 8,192 for the output. Longer
        models of Qwen's, and other families, have no such recipe; Llama 3.1 is trained with a scaling of its own.
        """
        rope = self.rope.rope
        if rope.kind == "yarn":
            return rope.original_max_position
        if rope.kind != "default" or not self.extends_by_yarn:
            return None
        return min(self._max_positions, 32_768) if self._max_positions <= 40_960 else None

    @cached_property
    def network(self) -> Network:
        """What else the engine needs to know, as plain data. Of a rank, its part."""
        experts = self.experts
        mlps = [layer.mlp for layer in self.layers]
        beside_mlp = any(own not in mlps for own in experts)
        attention = self.attending[0]
        method = self.build.method
        return Network(
            architecture=self.architecture,
            dtype=str(self.dtype).removeprefix("torch."),
            vocab_size=self.vocab_size,
            hidden_size=self.embedding.in_features,
            num_heads=attention.heads.size,
            attention_scale=attention.scale,
            layers=tuple(layer.mixer.kept for layer in self.layers),
            weights=self._weight_sizes(),
            modules={
                module: MatrixShape(linear.whole_shape(module), (rows, columns))
                for layer in self.layers
                for linear in layer.linears
                for module, rows, columns in linear.own_matrices()
            },
            max_model_len=self.max_model_len,
            yarn_positions=self.yarn_positions,
            experts=experts[0].spec if experts else None,
            num_expert_layers=len(experts),
            quantization=None if method is None else method.name,
            num_ranks=self.build.num_ranks,
            sums_per_layer=2 + beside_mlp,
            ropes=tuple(dict.fromkeys(attention.rope.rope for attention in self.attending)),
            has_layer_inputs=self.has_layer_inputs,
            sums_of_squares=sum(attention.has_joint_norms for attention in self.attending),
        )

    def _weight_sizes(self) -> WeightSizes:
        matrices = sum((layer.matrix_weights() for layer in self.layers), Weights())
        of_layers = sum((layer.vector_weights() for layer in self.layers), matrices)
        others = [child for child in self.children() if child not in self.layers]
        everything = sum((child.matrix_weights() + child.vector_weights() for child in others), of_layers)
        experts = sum((child.expert_weights() for child in self.experts), Weights())
        return WeightSizes(
            num_weights=everything.number,
            num_bytes=everything.nbytes,
            layer_bytes=of_layers.nbytes,
            stored_bytes=tuple(layer.stored_bytes for layer in self.layers),
            stored_expert_bytes=tuple(layer.expert_weights().nbytes for layer in self.layers),
            num_experts=self.experts[0].spec.num_experts if self.experts else 0,
            experts_per_token=self.experts[0].spec.num_experts_per_tok if self.experts else 0,
            layer_matrix_weights=matrices.number,
            expert_weights=experts.number,
            expert_bytes=experts.nbytes,
            head_bytes=self.lm_head.matrix_weights().nbytes,
        )


def _kind(layer: DecoderLayer) -> tuple[object, ...]:
    kept = layer.mixer.kept
    heads = (kept.heads, kept.head_dim) if isinstance(kept, KVLayer) else ()
    rope = layer.mixer.rope if isinstance(layer.mixer, Attention) else None
    return type(layer.mlp), type(kept), heads, tuple(layer.mixer.input.parts.values()), rope
