"""Run a file of requests in one batch and write a line of JSON for each result.

    python examples/batch_jsonl.py [MODEL_DIR] [--input FILE] [--output FILE]

Each input line has `messages` and, if wanted, an `id` and sampling parameters under their own names. For files too
large for memory use the command line, which works in windows: `nanovllm generate --jsonl FILE --json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from arguments import make_parser, model_directory

from nanovllm import LLM, SamplingParams

REQUESTS = Path(__file__).with_name("requests.jsonl")


def main() -> None:
    parser = make_parser("Run a file of requests in one batch.")
    parser.add_argument("--input", type=Path, default=REQUESTS, help="JSON lines (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="where to write the results (default: standard output)")
    args = parser.parse_args()
    requests = [json.loads(line) for line in args.input.read_text(encoding="utf-8").splitlines() if line.strip()]
    ids = [request.pop("id", number) for number, request in enumerate(requests)]
    conversations = [request.pop("messages") for request in requests]
    params = [SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **request}) for request in requests]

    with LLM(model_directory(args), num_gpu_blocks=16) as llm:
        outputs = llm.chat(conversations, params, use_tqdm=False)

    results = [
        {
            "id": request_id,
            "text": output.outputs[0].text,
            "finish_reason": output.outputs[0].finish_reason,
            "tokens": len(output.outputs[0].token_ids),
        }
        for request_id, output in zip(ids, outputs, strict=True)
    ]
    file = args.output.open("w", encoding="utf-8") if args.output is not None else sys.stdout
    for result in results:
        print(json.dumps(result, ensure_ascii=False), file=file)
    if args.output is not None:
        file.close()


if __name__ == "__main__":
    main()
