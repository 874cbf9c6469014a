"""Print text as it is generated.

    python examples/streaming.py [MODEL_DIR] [--prompt TEXT]

With `RequestOutputKind.DELTA` each output holds only what is new since the output before it.
"""

from __future__ import annotations

from arguments import make_parser, model_directory

from nanovllm import LLM, RequestOutputKind, SamplingParams


def main() -> None:
    parser = make_parser("Print text as it is generated.")
    parser.add_argument("--prompt", default="Once upon a time, in a village by the sea,")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    params = SamplingParams(
        temperature=0.8,
        top_p=0.95,
        seed=7,  # the same seed gives the same text
        max_tokens=args.max_tokens,
        output_kind=RequestOutputKind.DELTA,
    )

    with LLM(model_directory(args), num_gpu_blocks=8) as llm:
        print(args.prompt, end="", flush=True)
        for output in llm.stream(args.prompt, params):
            print(output.outputs[0].text, end="", flush=True)
    print(f"\n\nIt ended because of: {output.outputs[0].finish_reason}")
    metrics = output.metrics
    if metrics.tpot is not None:
        print(f"First token after {metrics.ttft:.2f} s, then {1 / metrics.tpot:.1f} tokens per second.")


if __name__ == "__main__":
    main()
