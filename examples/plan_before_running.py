"""Plan a prompt for a machine that is not at hand, then run a small one with the arguments of the plan.

    python examples/plan_before_running.py [MODEL_DIR] [--prompt-len N] [--gpu-mem SIZE] [--host-mem SIZE] [--link RATE]

The plan reads the model's config.json and no weights: it says what fits, what stays on the device, what streams and
which engine arguments to use. `nanovllm plan --help` lists what else it takes.
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout

from arguments import make_parser, model_directory

from nanovllm import LLM, SamplingParams
from nanovllm.apps.cli.main import main as nanovllm

STEP = ("--max-num-seqs", "8", "--max-num-batched-tokens", "512", "--kvcache-block-size", "128")


def main() -> None:
    parser = make_parser("Plan a prompt, then run with the arguments of the plan.")
    parser.add_argument("--prompt-len", default="8000", help="tokens (default: %(default)s)")
    parser.add_argument("--gpu-mem", default="800MB", help="memory of the device (default: %(default)s)")
    parser.add_argument("--host-mem", default="2GB", help="memory of the host (default: %(default)s)")
    parser.add_argument("--link", default="25GB/s", help="rate between them (default: %(default)s)")
    args = parser.parse_args()
    model = model_directory(args)
    machine = ("--gpu-mem", args.gpu_mem, "--host-mem", args.host_mem, "--link", args.link)
    with redirect_stdout(io.StringIO()) as printed:
        status = nanovllm(["plan", "--model", model, "--prompt-len", args.prompt_len, *machine, *STEP, "--json"])
    if not printed.getvalue():
        raise SystemExit(status)  # the reason is on standard error
    plan = json.loads(printed.getvalue())
    if not plan["fits"]:
        raise SystemExit(f"The prompt does not fit: {plan['advice']}")

    request = plan["request"]
    cache = plan["kv_cache"]
    print(f"Longest sequence: {cache['max_model_len']:,} tokens")
    print(f"KV cache: {cache['split']['resident_blocks']:,} resident, {cache['num_cpu_blocks']:,} host blocks")
    print(f"KV cache of this prompt: {request['kv_bytes'] / 2**20:,.1f} MiB")
    print(f"On the host: {request['streamed_bytes'] / 2**20:,.1f} MiB of it")
    print(f"Engine arguments: {plan['engine']}")
    with LLM(model, **plan["engine"]) as llm:
        (output,) = llm.generate(["Once upon a time"], SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
    print(f"Once upon a time{output.outputs[0].text}")


if __name__ == "__main__":
    main()
