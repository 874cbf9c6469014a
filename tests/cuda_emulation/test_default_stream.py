"""What an engine puts on the default stream of the emulated GPU while it is made and while it runs."""

from __future__ import annotations

from pathlib import Path

import emulated_gpu
from checkpoints import make_checkpoint
from engines import greedy, random_prompt
from lora_helpers import make_adapter

from nanovllm import LLM


def test_adapters_and_their_tables_are_written_by_the_compute_stream(tmp_path: Path) -> None:
    """The check of the attention backends, which waits for its own results, is all that uses the default stream."""
    model = make_checkpoint(tmp_path / "model", hidden=32, intermediate=32)
    adapter = make_adapter(tmp_path / "adapter", model, rank=4)
    sizes = {"num_gpu_blocks": 4, "max_model_len": 32, "max_lora_rank": 4, "max_loras": 1, "max_num_seqs": 1}
    engine = {"dtype": "float32", "device": "cuda", "enforce_eager": True, "enable_lora": True, **sizes}
    with emulated_gpu.default_stream_watched() as found, LLM(tmp_path / "model", **engine) as llm:
        assert llm._runner.pass_hooks[0].manager._tables is not None, "Triton does not run"  # type: ignore[attr-defined]
        llm.generate([random_prompt(5, 97, 1)], greedy(2), use_tqdm=False, lora_request=adapter)
    assert found, "the check of the backends uses it"
    assert not [each for each in found if "ops/backends.py" not in each and "ops/triton_support.py" not in each]
