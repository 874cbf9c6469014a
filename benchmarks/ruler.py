"""RULER's scores of a real model, resident, offloaded and with an 8-bit KV cache, and whether the answers are the same.

    python -m benchmarks.ruler --model MODEL [--lengths 2048 4096] [--tasks niah_single_1 ruler_vt] [--samples 2]

Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (2024): needles in a haystack
(niah), variables to trace (vt), common and frequent words (cwe, fwe) in texts of a given number of tokens. The texts
come from lm-eval's own code, which takes `pip install 'lm-eval[ruler]==0.4.13'` and no network; prompts and scores are
those of its tasks without a chat template. Decoding is greedy. Offloaded, the device has the share `--device-share` of
the longest prompt's KV, and the CPU attends to none of the rest, so that the tokens must be those of the resident run:
exit status 1 if they are not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from fractions import Fraction
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.options import Parser, add_json_option, not_negative, positive, share
from benchmarks.report import machine_facts, write_json
from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.memory.layout import layout_of
from nanovllm.models.hf_config import load_network_config
from nanovllm.text.tokenizer import HuggingFaceTokenizer

NAME = "python -m benchmarks.ruler"
LM_EVAL = "lm-eval[ruler]==0.4.13"


@dataclass(frozen=True, slots=True)
class Task:
    """One of RULER's tasks."""

    samples: Callable[[Any, int, int], list[dict[str, Any]]]  # by lm-eval, of a tokenizer, a length and a count
    max_tokens: int  # of an answer
    delimiter: str = " "  # between the text and the beginning of the answer


def _niah(haystack: str) -> Callable[[Any, int, int], list[dict[str, Any]]]:
    def samples(tokenizer: Any, length: int, count: int) -> list[dict[str, Any]]:
        from lm_eval.tasks.ruler import niah_utils, prepare_niah

        made: list[dict[str, Any]] = prepare_niah.generate_samples(
            prepare_niah.get_haystack(haystack),
            TOKENIZER=tokenizer,
            max_seq_length=length,
            type_haystack=haystack,
            type_needle_k="words",
            type_needle_v="numbers",
            template=niah_utils.TEMPLATE,
            num_samples=count,
        )
        return made

    return samples


def _variables(tokenizer: Any, length: int, count: int) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler.vt_utils import sys_vartrack_w_noise_random as samples

    (example,) = samples(tokenizer=tokenizer, num_samples=1, max_seq_length=500, incremental=5)
    made: list[dict[str, Any]] = samples(tokenizer, count, length, icl_example=example)
    return made


def _common_words(tokenizer: Any, length: int, count: int) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler.cwe_utils import sys_word_pair_random as samples

    made: list[dict[str, Any]] = samples(num_samples=count, max_seq_length=length, tokenizer=tokenizer)
    return made


def _frequent_words(tokenizer: Any, length: int, count: int) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler.fwe_utils import sys_kwext as samples

    # It fills the length with the text alone, which leaves no room for an answer at a model's last positions.
    made: list[dict[str, Any]] = samples(tokenizer=tokenizer, max_seq_length=length - 50, num_samples=count)
    return made


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "niah_single_1": Task(_niah("repeat"), 128),
        "niah_multikey_2": Task(_niah("needle"), 128),
        "ruler_vt": Task(_variables, 30),
        "ruler_cwe": Task(_common_words, 120, "\n\n"),
        "ruler_fwe": Task(_frequent_words, 50),
    }
)


SETTINGS = ("resident", "offloaded", "resident int8", "offloaded int8")
SLACK = 64  # tokens by which a prompt and its answer may be longer than asked for


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt of a task, in tokens, and the texts of which an answer must have all."""

    task: str
    length: int
    tokens: list[int]
    expected: tuple[str, ...]

    def score(self, answer: str) -> float:
        """The share of the expected texts that the answer has, regardless of case; as RULER counts it."""
        return sum(text.lower() in answer.lower() for text in self.expected) / len(self.expected)


def questions(args: argparse.Namespace) -> list[Question]:
    """The prompts of all tasks and lengths, from `--seed`. Raises ConfigError without lm-eval."""
    import random

    import numpy as np

    tokenizer = HuggingFaceTokenizer(Path(args.model)).tokenizer
    asked = []
    for name in args.tasks:
        task = TASKS[name]
        for length in args.lengths:
            random.seed(args.seed)
            np.random.seed(args.seed)  # lm-eval draws from both
            try:
                with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # it prints its search for a length
                    samples = task.samples(tokenizer, length, args.samples)
            except ImportError as error:
                raise ConfigError(f"RULER's tasks cannot be imported: {error}; pip install '{LM_EVAL}'.") from error
            for sample in samples:
                text = sample["input"]
                begun = sample["gen_prefix"]
                delimiter = "" if text[-1:].isspace() or begun[:1].isspace() else task.delimiter
                tokens = tokenizer(f"{text}{delimiter}{begun}").input_ids
                asked.append(Question(name, length, tokens, tuple(sample["outputs"])))
    return asked


def engine_arguments(setting: str, args: argparse.Namespace) -> dict[str, Any]:
    """What makes an engine of a setting. The longest prompt and its answer fit."""
    config = EngineConfig(model=args.model, kvcache_block_size=args.block_size)
    groups = layout_of(config, load_network_config(args.model).network).groups
    num_blocks = groups.most_blocks(max(args.lengths) + SLACK, args.max_num_batched_tokens) + len(groups)
    arguments: dict[str, Any] = {"kvcache_block_size": args.block_size, "num_gpu_blocks": num_blocks}
    if setting.startswith("offloaded"):
        on_device = max(4, int(num_blocks * args.device_share))
        arguments |= {"enable_cpu_offload": True, "cpu_attention": False, "num_cpu_blocks": num_blocks}
        arguments |= {"num_gpu_blocks": on_device}
    if setting.endswith("int8"):
        arguments["kv_cache_dtype"] = "int8"
    return arguments


def answers(setting: str, asked: Sequence[Question], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each question: its score, and the tokens and text of the answer."""
    rows = []
    chunk = args.max_num_batched_tokens
    with LLM(args.model, max_num_batched_tokens=chunk, **engine_arguments(setting, args)) as llm:
        for question in asked:
            params = SamplingParams(temperature=0.0, max_tokens=TASKS[question.task].max_tokens)
            start = time.perf_counter()
            (output,) = llm.generate([question.tokens], params, use_tqdm=False)
            answer = output.outputs[0]
            row = {"setting": setting, "task": question.task, "length": question.length}
            row |= {"prompt_tokens": len(question.tokens), "score": question.score(answer.text)}
            row |= {"expected": list(question.expected), "answer": answer.text, "answer_tokens": answer.token_ids}
            row["seconds"] = round(time.perf_counter() - start, 1)
            rows.append(row)
            print(
                f"{setting:<16} {question.task:<16} {len(question.tokens):>7,} tokens  {row['score']:.2f}  "
                f"{row['seconds']:>7} s  {answer.text.strip()[:60]!r}",
                flush=True,
            )
    return rows


def run(args: argparse.Namespace) -> int:
    """Ask all questions in all settings, print the scores, and write JSON if requested."""
    facts = machine_facts("cpu")
    print(f"{Path(args.model).name}; {facts['cpu']}, {facts['threads']} threads; commit {facts['commit']}")
    asked = questions(args)
    rows = {setting: answers(setting, asked, args) for setting in args.settings}
    print(f"\n{'task':<16} {'length':>7} " + " ".join(f"{setting:>14}" for setting in rows))
    for task in args.tasks:
        for length in args.lengths:
            shown = " ".join(f"{mean_score(answered, task, length):>14.2f}" for answered in rows.values())
            print(f"{task:<16} {length:>7,} {shown}")
    equal = compare(rows)
    results = [
        {name: row[name] for name in row if name != "answer_tokens"} for answered in rows.values() for row in answered
    ]
    write_json(args.output_json, args, facts, results=results, equal=equal)
    return 0 if all(count["equal"] == count["of"] for count in equal) else 1


def mean_score(rows: Sequence[Mapping[str, Any]], task: str, length: int) -> float:
    """Of the rows of a task and length, of which there is at least one."""
    scores = [row["score"] for row in rows if (row["task"], row["length"]) == (task, length)]
    return float(sum(scores) / len(scores))


def compare(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """How many answers of each offloaded setting have the tokens of the resident one."""
    counts = []
    for setting in rows:
        resident = setting.replace("offloaded", "resident")
        if setting == resident or resident not in rows:
            continue
        pairs = zip(rows[setting], rows[resident], strict=True)
        equal = sum(one["answer_tokens"] == other["answer_tokens"] for one, other in pairs)
        counts.append({"setting": setting, "equal": equal, "of": len(rows[setting])})
        print(f"{equal} of {len(rows[setting])} answers {setting} have the tokens of those {resident}")
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog=NAME, description="RULER's scores of a real model, resident and offloaded.")
    add = parser.add_argument
    add("--model", required=True, help="a model directory or GGUF file")
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="(default: all)")
    add("--lengths", nargs="+", type=positive, default=[2048], help="tokens of text and answer (default: %(default)s)")
    add("--samples", type=positive, default=1, help="of each task and length (default: %(default)s)")
    add("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS[:3]), help="(default: %(default)s)")
    add("--device-share", type=share, default=Fraction(1, 8), help="of the KV, offloaded (default: %(default)s)")
    add("--block-size", type=positive, default=128, help="tokens of a KV block (default: %(default)s)")
    add("--max-num-batched-tokens", type=positive, default=1024, help="of a chunk (default: %(default)s)")
    add("--seed", type=not_negative, default=0, help="of the texts")
    add_json_option(parser)
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
