"""Ask several questions about one document. The prefix cache computes the document once.

    python examples/many_questions.py [MODEL_DIR] [--document FILE] [--question TEXT ...]

The document comes first in every prompt, so all prompts share the KV cache blocks of that prefix. The first question
pays for the document; the others are answered together in one batch.
"""

from __future__ import annotations

from arguments import document_text, make_parser, model_directory

from nanovllm import LLM, RequestOutput, SamplingParams

QUESTIONS = (
    "Who dropped the white kid gloves and the fan?",
    "What did the label on the bottle say?",
    "What did the White Rabbit take out of its waistcoat-pocket?",
)


def show(question: str, output: RequestOutput) -> None:
    cached = output.num_cached_tokens
    tokens = len(output.prompt_token_ids)
    print(f"{question}\n  {' '.join(output.outputs[0].text.split())}")
    print(f"  {cached:,} of {tokens:,} prompt tokens were cached; first token after {output.metrics.ttft:.2f} s")


def main() -> None:
    parser = make_parser("Ask several questions about one document.", document=True)
    parser.add_argument("--question", action="append", help="may be given several times")
    args = parser.parse_args()
    first, *others = args.question or QUESTIONS
    text = document_text(args)
    params = SamplingParams(temperature=0.0, max_tokens=24, stop="\n\n")

    def conversation(question: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{text}\n\nQuestion: {question} Answer briefly."}]

    with LLM(model_directory(args), kvcache_block_size=64, num_gpu_blocks=192, max_num_batched_tokens=1024) as llm:
        show(first, llm.chat(conversation(first), params, use_tqdm=False)[0])
        outputs = llm.chat([conversation(question) for question in others], params, use_tqdm=False) if others else []
        for question, output in zip(others, outputs, strict=True):
            show(question, output)
        stats = llm.prefix_cache_stats()
    print(f"{stats.hit_rate:.0%} of all prompt tokens were found in the prefix cache.")


if __name__ == "__main__":
    main()
