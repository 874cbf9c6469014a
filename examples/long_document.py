"""Answer a question about a document whose KV cache is larger than the KV memory of the device.

    python examples/long_document.py [MODEL_DIR] [--document FILE] [--question TEXT]

On a CPU the "device" is an arena of `num_gpu_blocks` blocks. The rest of the KV cache is in host memory and streams
through the ring, as it does with a GPU.
"""

from __future__ import annotations

from arguments import document_text, make_parser, model_directory

from nanovllm import LLM, SamplingParams

BLOCK_SIZE = 128  # tokens; few, for many blocks of a short document: the default is from 256 to 4096, by the model
DEVICE_BLOCKS = 6
HOST_BLOCKS = 64


def main() -> None:
    parser = make_parser("Answer a question about a long document.", document=True)
    parser.add_argument("--question", default="What did the label on the bottle say?")
    args = parser.parse_args()
    content = f"{document_text(args)}\n\nQuestion: {args.question} Answer briefly."

    with LLM(
        model_directory(args),
        enable_cpu_offload=True,
        kvcache_block_size=BLOCK_SIZE,
        num_gpu_blocks=DEVICE_BLOCKS,
        num_cpu_blocks=HOST_BLOCKS,
        max_num_batched_tokens=1024,
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=32, stop="\n\n")
        (output,) = llm.chat([{"role": "user", "content": content}], params)
        stats = llm.kv_stats()

    tokens = len(output.prompt_token_ids)
    kv_mib = tokens * stats.bytes_per_block / stats.block_size / 2**20
    print(f"Question: {args.question}\nAnswer: {output.outputs[0].text.strip()}")
    print(f"{tokens:,} prompt tokens have {kv_mib:,.1f} MiB of KV cache.")
    print(f"The device has {stats.device_bytes / 2**20:,.1f} MiB of KV memory.")
    print(f"The first token came after {output.metrics.ttft:.1f} s.")


if __name__ == "__main__":
    main()
