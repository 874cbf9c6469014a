"""Where NaN or infinity in the logits comes from."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.models.decoder import Decoder

MOST_NAMED = 3


def explain_non_finite_logits(model: Decoder) -> str:
    """One sentence: the weights hold NaN or infinity, and which, or it was computed. Reads all weights."""
    damaged = [name for name, slot in model.slots() if not is_finite(slot.view)]
    if damaged:
        named = ", ".join(damaged[:MOST_NAMED])
        others = f" and {len(damaged) - MOST_NAMED} more" if len(damaged) > MOST_NAMED else ""
        return f"the logits hold NaN or infinity, and so do the weights, in {named}{others}: get the checkpoint anew"
    dtype = str(model.dtype).removeprefix("torch.")
    advice = "use dtype='bfloat16' or 'float32'" if model.dtype is torch.float16 else "check the checkpoint's config"
    return (
        f"the logits hold NaN or infinity, which was computed: all weights are finite, and {dtype} ends at "
        f"{torch.finfo(model.dtype).max:.3g}: {advice}"
    )


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite. Takes no memory beside the tensor."""
    return tensor.numel() == 0 or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
