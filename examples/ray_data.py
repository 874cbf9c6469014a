"""Answer the rows of Parquet files in a pipeline of Ray Data, with an engine in each of several actors.

    python examples/ray_data.py MODEL_DIR INPUT OUTPUT_DIR [--replicas N] [--gpus X]

INPUT is a Parquet file or a directory with a column `prompt`. The output has its columns and the answers; rows that
failed have an `error`. RAY_ADDRESS names a cluster; without it Ray uses this machine. Each engine takes a CPU of the
cluster, and reading the files takes another one. Needs `pip install 'nanovllm[ray]'`. `nanovllm batch` does the same
without a pipeline, and goes on where it was stopped.
"""

from __future__ import annotations

import argparse

import ray

from nanovllm import LLMPredictor

ENGINE = {"num_gpu_blocks": 64, "sampling_params": {"max_tokens": 40}}  # as of LLM, and the parameters of all rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer the rows of Parquet files with Ray Data.")
    parser.add_argument("model", help="model directory, or its name on the hub")
    parser.add_argument("input", help="Parquet file or directory with a column prompt")
    parser.add_argument("output", help="directory of the results")
    parser.add_argument("--replicas", type=int, default=2, help="engines (default: %(default)s)")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each engine (default: none)")
    args = parser.parse_args()

    rows = ray.data.read_parquet(args.input)
    answered = rows.map_batches(
        LLMPredictor,
        fn_constructor_kwargs={"model": args.model, **ENGINE},
        compute=ray.data.ActorPoolStrategy(size=args.replicas),
        num_gpus=args.gpus,
        batch_format="pyarrow",
        batch_size=64,  # rows that run together in an engine
    )
    answered.write_parquet(args.output)


if __name__ == "__main__":
    main()
