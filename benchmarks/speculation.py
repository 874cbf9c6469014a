"""Speculative decoding by n-grams: what a pass costs by its rows, and decode with and without it on a real model.

    python -m benchmarks.speculation rows --model MODEL [--contexts 2048 8192] [--num-layers N]
    python -m benchmarks.speculation tasks --model MODEL [--settings resident streamed] [--transformers]

`rows` verifies drafts of a given number, whether right or wrong, which is what the choice of their number rests on.
`tasks` continues texts that quote a document (a section rewritten with one name changed, its sentences, a table, a
file of code), free text, and 32 free texts at once. Two engines, with and without drafts, answer each in turns, after
a turn that does not count; decode is the time from the first token to the last. Answers must be the same: exit status 1
if one is not. `--transformers` and `--llama-cpp` answer the greedy tasks by other engines too, with their prompt lookup
and without, and count the tokens that are the same.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.options import Parser, add_json_option, positive
from benchmarks.report import machine_facts, print_row, write_json
from benchmarks.speculation_peers import Lookup, llama_cpp_lookup, transformers_lookup
from benchmarks.timing import Spread
from nanovllm import LLM, SamplingParams
from nanovllm.engine.request import Sequence as Running
from nanovllm.features.speculation.hook import Speculation

NAME = "python -m benchmarks.speculation"
ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
# tokens in a KV block; blocks on the device of a streamed engine: ring and one more
BLOCK = 256
DEVICE_BLOCKS = 2
SETTINGS = ("resident", "streamed", "streamed int8", "streamed, CPU attention")
LOOKUP = {"num_speculative_tokens": 15, "prompt_lookup_min": 3, "prompt_lookup_max": 5}
NGRAM = {"method": "ngram", **LOOKUP}
TEXT = Path(__file__).parent.parent / "nanovllm/apps/real_models/alice.txt"
CODE = Path(__file__).parent.parent / "nanovllm/features/speculation/ngrams.py"
PLACES = ("boiler room", "north stairs", "loading dock", "archive", "roof terrace")


@dataclass(frozen=True, slots=True)
class Task:
    """What is continued. prompts: texts that run at once."""

    name: str
    prompts: Sequence[str]
    temperature: float


def tasks() -> list[Task]:
    """Answers begin where a paragraph, a sentence or a line does: a model does not go on with half a word."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in TEXT.read_text().split("\n\n") if paragraph.strip()]
    document = "\n\n".join(paragraphs[2:22])
    code = CODE.read_text()
    sentences = [sentence for sentence in re.findall(r"\S[^.!?]*[.!?]+'?\)?", document) if len(sentence) > 60]
    renamed = _beginning(document.replace("Alice", "Mary"), 600, ". ").rstrip()
    new_code = _beginning(code.replace("_found", "_place"), 1400, "\n").rstrip()
    rows = "\n".join(f"| {8 + i // 5}:00 | {PLACES[i % 5]} | door closed, lights off | no remarks |" for i in range(40))
    rewrite = f"{document}\n\nThe same text again, with the name Mary instead of Alice:\n\n{renamed}"
    quoted = "\n- ".join(sentences[:6])
    extract = f"{document}\n\nThe long sentences of this text, word for word:\n\n- {quoted}\n-"
    table = f"| time | place | state | remarks |\n|---|---|---|---|\n{rows}\n|"
    fix = f"```python\n{code}```\n\nThe same file, with `_found` renamed to `_place`:\n\n```python\n{new_code}"
    free = [f"{opening} {number} years ago" for number in range(2, 18) for opening in ("My uncle met her", "It began")]
    return [
        Task("rewrite a section", [rewrite], 0.0),
        Task("extract sentences", [extract], 0.0),
        Task("continue a table", [table], 0.0),
        Task("fix code", [fix], 0.0),
        Task("free text", [f"{document[:6000]}\n\nAn essay on something else: the history of the railway."], 0.8),
        Task("32 at once", free, 0.8),
    ]


def _beginning(text: str, characters: int, end: str) -> str:
    """At least so many characters of a text, up to the next `end`."""
    return text[: text.index(end, characters) + len(end)]


def engine(model: str, setting: str, tokens: int, **more: Any) -> LLM:
    """tokens: that the KV cache must hold."""
    blocks = -(-tokens // BLOCK) + 3
    memory: dict[str, Any] = {"num_gpu_blocks": blocks}
    if setting != "resident":
        memory = {"enable_cpu_offload": True, "num_gpu_blocks": DEVICE_BLOCKS, "num_cpu_blocks": blocks}
        memory["cpu_attention"] = setting.endswith("attention")
    if setting.endswith("int8"):
        memory["kv_cache_dtype"] = "int8"
    sizes = {"kvcache_block_size": BLOCK, "max_num_batched_tokens": 2048, "swap_space": 0}
    return LLM(model, device="cpu", **sizes, **memory, **more)


# ---- what a pass costs by its rows


class Forced:
    """Drafts a given number of tokens."""

    def __init__(self) -> None:
        self.count = 0

    def draft(self, seq: Running, most: int, rows: int, tokens: int) -> Sequence[int]:
        return [7] * min(self.count, most)

    def begin_step(self, wanted: Sequence[tuple[Running, int]], most: int, rows: int, tokens: int) -> None:
        pass

    def computed(self, seq: Running, begin: int, end: int) -> None:
        pass

    def verified(self, seq: Running, drafted: int, accepted: int) -> None:
        pass

    def measured(self, rows: int, seconds: float) -> None:
        pass

    def close(self) -> None:
        pass


def costs_by_rows(model: str, setting: str, context: int, rounds: int, layers: int | None) -> dict[int, Spread]:
    """Milliseconds of a step by its rows, which take turns on one sequence. layers: so many, of random weights."""
    config = {"method": "ngram", "num_speculative_tokens": max(ROWS) - 1}
    output = max(ROWS) * len(ROWS) * (rounds + 2)
    longest = context + output
    overrides = {"max_position_embeddings": longest}
    more: dict[str, Any] = {"max_model_len": longest, "hf_overrides": overrides}
    if layers is not None:
        more |= {"hf_overrides": overrides | {"num_hidden_layers": layers}, "load_format": "dummy"}
    times_of: dict[int, list[float]] = {rows: [] for rows in ROWS}
    random = Random(context)
    forced = Forced()
    with engine(model, setting, longest, speculative_config=config, **more) as llm:
        (hook,) = (hook for hook in llm.engine.scheduler.hooks if isinstance(hook, Speculation))
        hook.drafter = forced
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        llm.engine.add_request("rows", None, params, [random.randrange(1000) for _ in range(context)])
        while not llm.engine.step():
            pass
        for index in range(rounds + 1):
            for rows in ROWS if index % 2 else reversed(ROWS):
                forced.count = rows - 1
                begin = time.perf_counter()
                llm.engine.step()
                if index:
                    times_of[rows].append(1e3 * (time.perf_counter() - begin))
    return {rows: _spread(times) for rows, times in times_of.items()}


def run_rows(args: argparse.Namespace) -> int:
    results = []
    for context in args.contexts:
        for setting in args.settings:
            costs = costs_by_rows(args.model, setting, context, args.rounds, args.num_layers)
            results.append({"context": context, "setting": setting, "ms_by_rows": costs})
            one = costs[1].median
            line = ", ".join(f"{rows}: {cost.median / one:.2f}" for rows, cost in costs.items())
            print_row(f"{context} {setting}", f"{one:.1f} ms", line)
    write_json(args.output_json, args, machine_facts("cpu"), results=results)
    return 0


# ---- decode of tasks


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of each prompt, seconds of decode, and drafts of the turn."""

    tokens: list[list[int]]
    seconds: float
    drafted: int = 0
    accepted: int = 0


def answer(llm: LLM, task: Task, max_tokens: int) -> Answer:
    temperature = task.temperature
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens) for i in range(len(task.prompts))]
    outputs = llm.generate([*task.prompts], params, use_tqdm=False)
    answers = [(output.outputs[0].token_ids, output.metrics) for output in outputs]
    first = max(metrics.first_token_time or 0.0 for _, metrics in answers)
    last = max(metrics.finished_time or 0.0 for _, metrics in answers)
    drafted = sum(m.drafted_tokens for _, m in answers)
    accepted = sum(m.accepted_tokens for _, m in answers)
    return Answer([list(tokens) for tokens, _ in answers], last - first, drafted, accepted)


def in_turns(sides: Sequence[Callable[[], Answer]], rounds: int) -> tuple[list[Answer], list[Answer]]:
    """The answers of two sides, without and with drafts, that count: all but those of the first round."""
    answers: tuple[list[Answer], list[Answer]] = ([], [])
    for index in range(rounds + 1):
        for side in (0, 1) if index % 2 else (1, 0):
            answers[side].append(sides[side]())
    return answers[0][1:], answers[1][1:]


def summary(task: Task, who: str, off: Sequence[Answer], on: Sequence[Answer]) -> dict[str, Any]:
    speedup = _spread(a.seconds / b.seconds for a, b in zip(off, on, strict=True))
    pairs = list(zip(off[0].tokens, on[0].tokens, strict=True))
    equal = sum(a == b for a, b in pairs)
    agreeing = [sum(x == y for x, y in zip(a, b, strict=False)) for a, b in pairs]
    tokens = sum(map(len, off[0].tokens))
    line = f"{speedup.low:.2f} to {speedup.high:.2f}; {on[0].accepted} of {on[0].drafted} drafts, {tokens} tokens"
    print_row(f"{who}: {task.name}", f"{speedup.median:.2f} times", f"{line}, {equal} of {len(pairs)} outputs equal")
    return {
        "task": task.name,
        "engine": who,
        "speedup": speedup,
        "seconds_off": _spread(answer.seconds for answer in off),
        "seconds_on": _spread(answer.seconds for answer in on),
        "outputs": len(pairs),
        "outputs_equal": equal,
        "tokens": tokens,
        "tokens_equal": sum(agreeing),
        "drafted": on[0].drafted,
        "accepted": on[0].accepted,
    }


def run_tasks(args: argparse.Namespace) -> int:
    chosen = [task for task in tasks() if args.tasks is None or task.name in args.tasks]
    results = []
    is_exact = True
    for setting in args.settings:
        tokens = 4096 if all(len(task.prompts) == 1 for task in chosen) else 32 * (32 + args.max_tokens)
        with (
            engine(args.model, setting, tokens) as off,
            engine(args.model, setting, tokens, speculative_config=NGRAM) as on,
        ):
            for task in chosen:
                sides = [partial(answer, llm, task, args.max_tokens) for llm in (off, on)]
                row = summary(task, setting, *in_turns(sides, args.rounds))
                results.append(row)
                is_exact &= row["outputs_equal"] == row["outputs"]
    results += others(args, [task for task in chosen if task.temperature == 0.0])
    write_json(args.output_json, args, machine_facts("cpu"), results=results, exact=is_exact)
    return 0 if is_exact else 1


def others(args: argparse.Namespace, chosen: Sequence[Task]) -> Iterator[dict[str, Any]]:
    """The same greedy tasks by the other engines that were asked for."""
    drafts = LOOKUP["num_speculative_tokens"]
    ngram = LOOKUP["prompt_lookup_max"]
    model = args.model
    if args.transformers:
        yield from by_other("Transformers", transformers_lookup(model, drafts), args, chosen)
    if args.llama_cpp is not None:
        settings = {"drafts": drafts, "ngram": ngram, "threads": torch.get_num_threads(), "max_len": 4096}
        python, gguf = args.llama_cpp
        with llama_cpp_lookup(python, gguf, model, settings) as lookup:
            yield from by_other("llama.cpp", lookup, args, chosen)


def by_other(who: str, lookup: Lookup, args: argparse.Namespace, chosen: Sequence[Task]) -> Iterator[dict[str, Any]]:
    def one(task: Task, is_drafting: bool) -> Answer:
        tokens, seconds = lookup(task.prompts[0], args.max_tokens, is_drafting)
        return Answer([tokens], seconds)

    for task in chosen:
        yield summary(task, who, *in_turns([partial(one, task, False), partial(one, task, True)], args.rounds))


def _spread(values: Any) -> Spread:
    numbers = list(values)
    return Spread(statistics.median(numbers), min(numbers), max(numbers))


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    by_rows = commands.add_parser("rows", help="what a pass costs by its rows")
    by_rows.add_argument("--contexts", type=positive, nargs="+", default=[2048, 8192], help="in tokens")
    by_rows.add_argument("--num-layers", type=positive, help="so many, with random weights (default: the model's)")
    by_task = commands.add_parser("tasks", help="decode with and without drafts")
    names = [task.name for task in tasks()]
    by_task.add_argument("--tasks", nargs="+", choices=names, help="(default: all)")
    by_task.add_argument("--max-tokens", type=positive, default=256, help="of an answer (default: %(default)s)")
    by_task.add_argument("--transformers", action="store_true", help="the greedy tasks by Transformers too")
    told = "and by llama.cpp: the Python of an environment with llama-cpp-python, and the model as GGUF"
    by_task.add_argument("--llama-cpp", type=Path, nargs=2, metavar=("PYTHON", "GGUF"), help=told)
    for command in (by_rows, by_task):
        command.add_argument("--model", required=True, help="directory of the checkpoint")
        command.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS[:3], help="(default: first 3)")
        command.add_argument("--rounds", type=positive, default=3, help="turns that count (default: %(default)s)")
        add_json_option(command)
    return parser.run(argv, lambda args: run_rows(args) if args.command == "rows" else run_tasks(args))


if __name__ == "__main__":
    sys.exit(main())
