"""Batch invariance: whether a request's logits depend, in their bits, on the rest of its batch."""

from __future__ import annotations

import logging

import torch

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.models.decoder import Decoder
from nanovllm.ops.attention import AttentionBackend
from nanovllm.ops.backends import is_chunk_invariant

logger = logging.getLogger(__name__)


def keep_batch_invariance(config: EngineConfig, model: Decoder, backend: AttentionBackend) -> None:
    """Choose the model's matrix products as `batch_invariant` asks, and log whether logits are batch-invariant.

    None and True choose kernels that compute each row independently, where there are any; True raises ConfigError where
    there are none. False chooses torch's products where torch uses matrix units that the engine's kernels do not.
    """
    misfit = _misfit(model, backend)
    if config.batch_invariant and misfit is not None:
        raise ConfigError(f"batch_invariant=True: {misfit}; leave it out")
    if config.batch_invariant is False and _torch_is_faster(model):
        model.use_torch_products()
        logger.info("batch_invariant=False: products of many rows are torch's, whose last bits depend on the batch")
    elif misfit is not None:
        logger.info("logits may differ in their last bits between batches: %s", misfit)
    else:
        logger.info("a request's logits do not depend on its batch, to the bit")


def _misfit(model: Decoder, backend: AttentionBackend) -> str | None:
    """Why a request's logits may depend on its batch, or None."""
    if model.device.type != "cpu":
        return f"on {model.device.type} the order of a sum depends on the number of rows in a step"
    if not is_chunk_invariant(backend):
        return (
            f"heads of {model.spec.head_dim} are attended by torch's operator, which sums by the shape of a chunk,"
            " since the engine's kernel takes multiples of 16"
        )
    return None


def _torch_is_faster(model: Decoder) -> bool:
    """Whether torch multiplies with AMX, in bf16, which csrc/cpu_linear does not use."""
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return model.device.type == "cpu" and model.dtype == torch.bfloat16 and bool(has_amx())
