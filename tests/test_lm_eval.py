"""lm-eval with its own backend for vLLM, which a package of that name makes this engine: as with Transformers. Slow."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from checkpoints import make_checkpoint
from tokenizer_files import write_byte_level

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: pip install lm-eval==0.4.13")
datasets = pytest.importorskip("datasets", reason="needs datasets, which lm-eval brings")

pytestmark = pytest.mark.slow

# What lm-eval imports of vLLM.
VLLM = {
    "__init__.py": "from nanovllm import LLM, SamplingParams, TokensPrompt\n",
    "lora/__init__.py": "",
    "lora/request.py": "from nanovllm.features.lora.request import LoRARequest\n",
    "entrypoints/__init__.py": "",
    "entrypoints/chat_utils.py": "def resolve_chat_template(tokenizer, **others): return tokenizer.chat_template\n"
    "resolve_hf_chat_template = resolve_chat_template\n",
    "tokenizers.py": "from transformers import AutoTokenizer\n"
    "def get_tokenizer(name, tokenizer_mode, **others): return AutoTokenizer.from_pretrained(name, **others)\n",
}
ENGINE = {"kvcache_block_size": 16, "num_gpu_blocks": 4, "num_cpu_blocks": 80, "enable_cpu_offload": True}


@pytest.fixture
def vllm_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in VLLM.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    facts = tmp_path / "vllm-0.19.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.19.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in list(sys.modules):
        if name.split(".")[0] == "vllm" or name == "lm_eval.models.vllm_causallms":
            del sys.modules[name]


def rows(**_: Any) -> dict[str, Any]:
    """Texts of one to about ten blocks; the longest does not fit on the device."""
    random = Random(1)
    texts = ["".join(random.choice("abcdefgh ") for _ in range(length)) for length in (5, 20, 60, 150)]
    return {"test": datasets.Dataset.from_list([{"text": text, "choices": ["ab", "cd e", "h"]} for text in texts])}


def tasks() -> list[dict[str, Any]]:
    common = {"custom_dataset": rows, "test_split": "test", "doc_to_text": "{{text}}", "metadata": {"version": 1}}
    generate = {"until": ["zz"], "max_gen_toks": 12, "do_sample": False}
    return [
        {
            **common,
            "task": "continues",
            "output_type": "generate_until",
            "doc_to_target": "x",
            "generation_kwargs": generate,
            "metric_list": [{"metric": "exact_match"}],
        },
        {
            **common,
            "task": "chooses",
            "output_type": "multiple_choice",
            "doc_to_target": 0,
            "doc_to_choice": "{{choices}}",
            "metric_list": [{"metric": "acc"}],
        },
    ]


def answers(model: str, model_args: dict[str, Any]) -> dict[str, list[Any]]:
    """All answers by task: texts, or (log-probability, whether greedy)."""
    found = lm_eval.simple_evaluate(model=model, model_args=model_args, tasks=tasks(), batch_size=1, bootstrap_iters=0)
    return {task: [sample["resps"] for sample in samples] for task, samples in found["samples"].items()}


@pytest.mark.usefixtures("vllm_on_the_path")
def test_tasks_have_the_answers_of_transformers(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_checkpoint(model, vocab=300, max_positions=512)
    write_byte_level(model)
    expected = answers("hf", {"pretrained": str(model), "dtype": "float32", "device": "cpu"})
    found = answers("vllm", {"pretrained": str(model), "dtype": "float32", **ENGINE})
    assert len(found["continues"]) == 4 and found["continues"] == expected["continues"]
    assert any(text for ((text,),) in found["continues"])
    for ours, theirs in zip(found["chooses"], expected["chooses"], strict=True):
        for (mine,), (other,) in zip(ours, theirs, strict=True):
            assert float(mine[0]) == pytest.approx(float(other[0]), abs=1e-3) and mine[1] == other[1]
