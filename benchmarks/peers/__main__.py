"""nanovllm compared with other engines: the same random checkpoint on the CPU, in one run.

    python -m benchmarks.peers [--engines nanovllm vllm] [--prompt-lens 512 8192] [--dtype float32] [--output-dir DIR]
    python -m benchmarks.peers --gguf FILE.gguf | --gguf-type Q4_K [--prompt-lens 512 4096]

The second form runs nanovllm and llama.cpp on the same GGUF file: one that exists, or the random checkpoint in a type.
Engines: nanovllm, vLLM's CPU wheel, llama.cpp through llama-cpp-python, Transformers, each in a virtual environment
that is created under --work-dir on first use. They take turns, one process at a time. Only nanovllm runs prompts above
8192 tokens. An engine that fails or cannot be installed is reported with its error, the others continue, and the exit
status is 1. The defaults take about 40 minutes on two cores without other load, and 15 more to create the environments.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gguf_types import TYPES
from benchmarks.options import Parser, not_negative, positive
from benchmarks.peers.checkpoint import make_checkpoint
from benchmarks.peers.driver import GGUF_ENGINES, RUNNERS, Findings, Plan, Workshop, job_of, report_failure, take_turns
from benchmarks.peers.env import TORCH, EngineFailure
from benchmarks.peers.summary import markdown, rows
from benchmarks.report import machine_facts, write_json
from benchmarks.shapes import Shape, open_shape

NAME = "python -m benchmarks.peers"
WORK_DIR = Path("build/peers")
GGUF_TYPES = {"bfloat16": "BF16", "float32": "F32"}  # by the dtype that all engines compute in


def run(args: argparse.Namespace) -> int:
    args.work_dir = args.work_dir.resolve()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    workshop = Workshop(args.work_dir, shlex.split(args.torch))
    if args.gguf is not None:
        with open_shape(str(args.gguf), None, "auto", "auto") as shape:
            findings = measure(args, shape, args.gguf, workshop)
        return 1 if findings.failures else 0
    with open_shape(args.model, args.num_layers, args.dtype) as shape:
        name = f"{shape.name}-{shape.network.num_layers}-layers-{args.dtype}"
        checkpoint = make_checkpoint(shape, args.work_dir / name, args.seed)
        findings = measure(args, shape, checkpoint, workshop)
    return 1 if findings.failures else 0


def measure(args: argparse.Namespace, shape: Shape, checkpoint: Path, workshop: Workshop) -> Findings:
    """Install, convert, run, and report after each round, so that an interrupted run keeps its results.

    checkpoint: a directory, or the GGUF file of --gguf.
    """
    findings = Findings()
    gguf = args.gguf
    pythons = workshop.pythons(args.engines, findings.failures)
    if gguf is None and ("llama.cpp" in pythons or args.gguf_type is not None):
        try:
            kind = args.gguf_type or GGUF_TYPES[args.dtype]
            gguf = workshop.gguf(checkpoint, pythons.get("llama.cpp", Path(sys.executable)), kind)
        except EngineFailure as error:
            report_failure(findings.failures, "llama.cpp" if args.gguf_type is None else "--gguf-type", error)
            pythons = {} if args.gguf_type is not None else pythons
            pythons.pop("llama.cpp", None)
    if args.gguf_type is not None and gguf is not None:
        with open_shape(str(gguf), None, "auto", "auto") as stored:
            return run_rounds(args, stored, gguf, gguf, workshop, pythons, findings)
    return run_rounds(args, shape, checkpoint, gguf, workshop, pythons, findings)


def run_rounds(
    args: argparse.Namespace,
    shape: Shape,
    checkpoint: Path,
    gguf: Path | None,
    workshop: Workshop,
    pythons: Mapping[str, Path],
    findings: Findings,
) -> Findings:
    plan = plan_of(args, list(pythons))
    jobs = {n: job_of(shape, checkpoint, gguf, plan, n, workshop.threads) for n in plan.prompt_lens}
    text = ""
    for _ in take_turns(plan, jobs, workshop.runner(pythons), workshop.ceilings, findings):
        text = report(args, shape, findings)
    print(f"\n{text}")
    return findings


def plan_of(args: argparse.Namespace, engines: Sequence[str]) -> Plan:
    return Plan(engines, sorted(set(args.prompt_lens)), args.output_len, args.repeats, args.seed)


def report(args: argparse.Namespace, shape: Shape, findings: Findings) -> str:
    """Write tables and figures; returns the tables."""
    plan = plan_of(args, args.engines)
    facts = machine_facts("cpu") | {"cores": len(os.sched_getaffinity(0))}
    table = rows(shape, plan, findings)
    text = markdown(shape, plan, findings, facts, table)
    (args.output_dir / "peers.md").write_text(text)
    runs = [{"engine": engine, "prompt_len": n, "rounds": done} for (engine, n), done in findings.runs.items()]
    parts: dict[str, Any] = {"rows": table, "failures": findings.failures, "runs": runs}
    write_json(args.output_dir / "peers.json", args, facts, model=shape.facts(), ceilings=findings.ceilings, **parts)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    description = "nanovllm compared with other engines: the same random checkpoint on the CPU."
    parser = Parser(prog=NAME, description=description)
    add = parser.add_argument
    add("--engines", nargs="+", choices=list(RUNNERS), help="which to run (default: all)")
    add("--prompt-lens", type=positive, nargs="+", default=[512, 2048, 8192, 32768], help="tokens")
    add("--output-len", type=positive, default=32, help="tokens to generate (default: %(default)s)")
    add("--repeats", type=positive, default=3, help="rounds (default: %(default)s)")
    add("--model", default="qwen3-0.6b", help="a published name, or a directory with a config.json")
    add("--num-layers", type=positive, help="layers to keep of the model (default: all)")
    add("--dtype", choices=list(GGUF_TYPES), default="bfloat16", help="of the weights (default: %(default)s)")
    add(
        "--gguf", type=Path, metavar="FILE", help="a GGUF file that nanovllm and llama.cpp run, in the place of --model"
    )
    add("--gguf-type", choices=TYPES, help="run nanovllm and llama.cpp on the random checkpoint in this type of GGUF")
    add("--work-dir", type=Path, default=WORK_DIR, help="of environments and checkpoint (default: %(default)s)")
    add("--output-dir", type=Path, default=Path("benchmarks/results"), help="for peers.json and peers.md")
    add("--torch", default=TORCH, help="pip arguments that install torch (default: %(default)s)")
    add("--seed", type=not_negative, default=0, help="of weights and prompts")

    def checked(args: argparse.Namespace) -> int:
        as_gguf = args.gguf is not None or args.gguf_type is not None
        if args.gguf is not None and (args.gguf_type is not None or args.num_layers is not None):
            parser.error(
                f"--gguf {args.gguf}: the file has its type and layers: leave --gguf-type and --num-layers out"
            )
        others = [engine for engine in args.engines or () if as_gguf and engine not in GGUF_ENGINES]
        if others:
            parser.error(f"--engines {others[0]}: only {' and '.join(GGUF_ENGINES)} run GGUF files")
        args.engines = args.engines or list(GGUF_ENGINES if as_gguf else RUNNERS)
        return run(args)

    return parser.run(argv, checked)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running engine is ended too
    sys.exit(main())
