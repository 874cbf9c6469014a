"""SmolLM2-135M-Instruct as a GGUF file with 4-bit weights, as it lies: text, memory, perplexity, bits, other types."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf", reason="the package gguf is not installed")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_gguf import write_tiny_gguf

from benchmarks.requantize import perplexity
from nanovllm.apps.real_models import UnavailableError
from nanovllm.apps.real_models.reading import story
from nanovllm.apps.real_models.smollm2 import FILE
from nanovllm.text.tokenizer import HuggingFaceTokenizer

pytestmark = pytest.mark.slow

TOKENS = 2000
TEXTS = st.text(
    st.one_of(st.sampled_from("ab 0123456789\n\t'-<|im_end|>"), st.characters(exclude_categories=["Cs"])), max_size=200
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return FILE.fetch(tmp_path_factory.mktemp("smollm2"))
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> float:
    """Transformers' perplexity on the dequantized weights, in float32."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    tokens = torch.tensor(HuggingFaceTokenizer(smollm2_dir).encode(story())[:TOKENS])
    with torch.inference_mode():
        hidden = network.model(tokens[None]).last_hidden_state[0, :-1]
        parts = zip(hidden.split(256), tokens[1:].split(256), strict=True)
        losses = [
            torch.nn.functional.cross_entropy(network.lm_head(rows).double(), wanted, reduction="sum").item()
            for rows, wanted in parts
        ]
    return math.exp(math.fsum(losses) / len(hidden))


def test_text_becomes_the_tokens_of_the_original(model: Path, smollm2_dir: Path) -> None:
    own = HuggingFaceTokenizer(model)
    original = HuggingFaceTokenizer(smollm2_dir)

    @settings(max_examples=2000, suppress_health_check=list(HealthCheck))
    @given(TEXTS)
    def check(text: str) -> None:
        ids = own.encode(text)
        assert ids == original.encode(text) and own.decode(ids) == original.decode(ids)

    check()
    assert own.encode(story()) == original.encode(story())
    assert own.tokenizer.chat_template == original.tokenizer.chat_template


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 5e-3)])
def test_perplexity_is_that_of_transformers(model: Path, reference: float, dtype: str, bound: float) -> None:
    found, weight_bytes = perplexity(model, TOKENS, dtype)
    assert abs(found / reference - 1) < bound
    assert weight_bytes < 1.1 * model.stat().st_size


MEASURE = """
import gc, re, sys
from pathlib import Path
from nanovllm import LLM, SamplingParams
from nanovllm.models.hf_config import load_network_config

def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def run(path):
    memory = {"kvcache_block_size": 16, "num_gpu_blocks": 64, "max_num_batched_tokens": 64, "max_model_len": 256}
    with LLM(path, skip_tokenizer_init=True, **memory) as llm:
        params = SamplingParams(max_tokens=4, temperature=0.0, detokenize=False)
        llm.generate([[5, 6, 7] * 20], params, use_tqdm=False)
        return llm.kv_stats().device_bytes, status("VmRSS")

run(sys.argv[1])  # libraries, and those that reading the larger model's config takes
load_network_config(sys.argv[2])
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
before = status("VmRSS")
kv, after = run(sys.argv[2])
print(status("VmHWM") - before, after - before, kv)
"""


def test_the_process_never_takes_much_more_than_the_file_and_kv(model: Path, tmp_path: Path) -> None:
    """At its highest, while loading and after: what is read, and weights in another order, are no second copy."""
    write_tiny_gguf(tmp_path / "tiny.gguf")
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "tiny.gguf"), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    highest, after, kv = (int(number) for number in done.stdout.split()[-3:])
    size = model.stat().st_size
    # The kernel counts pages per processor, in batches: the highest may be read as some pages less than the last.
    assert 0.9 * size < after
    assert highest <= min(1.1 * size + kv, after + 0.05 * size)
