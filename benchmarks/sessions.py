"""Agents' sessions on tiny random models: how many old tokens each request computes again.

    python -m benchmarks.sessions [--families gemma3 ...] [--patterns append ...] [--cache 1 0.5 0.25] [--offload]
    python -m benchmarks.sessions --kv-cache-dir DIR
    python -m benchmarks.sessions --first-token [gemma3 smollm2] [--session-tokens N] [--llama-cpp PYTHON]

A family's engine plays all patterns one after the other. Their sessions have one system prompt of 6,000 tokens and go
on for ten turns. Old tokens of a request are the longest beginning that it has in common with an earlier prompt and its
answer. Those that the prefix cache does not give are computed again. A cell of the table shows the most of any request,
apart for requests that part from earlier ones at a new place.

The KV cache has `--tokens` tokens times the share of `--cache` for each group of layers that keep the same tokens; with
`--offload` it is in host memory. Before each request the engine computes another prompt of `--between` tokens, which
has nothing in common with any other. With `--kv-cache-dir` each session is interrupted before its last two requests: a
new engine gets them, which finds old tokens on disk.

`--first-token` measures instead how long the last turn of a real model's session waits for its first token, reasoning
stripped, and how long without a prefix cache. `--llama-cpp` names the Python of an environment with llama-cpp-python,
which then runs the same GGUF file (`python -m benchmarks.peers` makes one).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.options import Parser, add_json_option, not_negative, positive, share
from benchmarks.report import machine_facts, print_row, write_json
from benchmarks.session_first_token import MODELS as REAL_MODELS
from benchmarks.session_first_token import measure
from benchmarks.session_patterns import PATTERNS, Asked, Player, Talk, Tokens, cell, num_requests, worst
from nanovllm import LLM, SamplingParams
from nanovllm.data.kv_groups import kv_groups
from nanovllm.models.hf_config import load_network_config

NAME = "python -m benchmarks.sessions"
BLOCK = 256
DEVICE_BLOCKS = 8  # of a group, with offload
AFTER_RESTART = 2  # requests of a session
POSITIONS = 32768
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
ROPE = {"rope_type": "default", "rope_theta": 1e6}
BOTH_ROPES = {"full_attention": ROPE, "sliding_attention": ROPE}
RECURRENT = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": ROPE,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FIVE_OF_SIX = ["sliding_attention"] * 5 + ["full_attention"]
# Of each family the fields of its config.json besides COMMON. No family has windows and recurrent layers.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_parameters": ROPE},
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": ROPE,
    },
    "qwen3_5": {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **RECURRENT},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "layer_types": FIVE_OF_SIX,
        "sliding_window": 512,
        "query_pre_attn_scalar": 16,
        "rope_parameters": BOTH_ROPES,
    },
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "layer_types": FIVE_OF_SIX,
        "sliding_window": 512,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {"full_attention": {**ROPE, "rope_type": "proportional"}, "sliding_attention": ROPE},
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "shared_expert_intermediate_size": 48,
        **EXPERTS,
        **RECURRENT,
    },
}


@dataclass(frozen=True, slots=True)
class Memory:
    """Where the KV cache is. tokens: that it holds of each group of layers."""

    tokens: int = 51_200
    offload: bool = False
    kv_cache_dir: Path | None = None
    max_num_seqs: int = 64
    chunk: int = 2048


def write_model(directory: Path, family: str, talk: Talk, **fields: Any) -> Path:
    """A directory with the config.json of a tiny model, created if missing. fields: further ones, or other values."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {**COMMON, **FAMILIES[family], "vocab_size": talk.vocab, **fields}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def has_full_attention_only(model: Path) -> bool:
    network = load_network_config(model).network
    return network.recurrent is None and not any(network.kv_windows)


def make_engine(model: Path, memory: Memory) -> LLM:
    groups = kv_groups(load_network_config(model).network.kv_windows, BLOCK)
    blocks = memory.tokens // BLOCK * len(groups)
    tiers: dict[str, Any] = {"num_gpu_blocks": blocks}
    if memory.offload:
        device_blocks = DEVICE_BLOCKS * len(groups)
        tiers = {"enable_cpu_offload": True, "num_gpu_blocks": device_blocks, "num_cpu_blocks": blocks}
    return LLM(
        model,
        load_format="dummy",
        device="cpu",
        dtype="float32",
        kvcache_block_size=BLOCK,
        max_num_seqs=memory.max_num_seqs,
        max_num_batched_tokens=memory.chunk,
        swap_space=0,
        kv_cache_dir=memory.kv_cache_dir,
        **tiers,
    )


class Engines:
    """An engine that answers, until another one takes its place."""

    def __init__(self, model: Path, memory: Memory, answer: int) -> None:
        self._model = model
        self._memory = memory
        self._answer = answer
        self._count = 0
        self.llm = make_engine(model, memory)

    def ask(self, prompt: Tokens, most: int | None = None) -> tuple[Tokens, int]:
        """A random answer, and how many tokens of the prompt were cached."""
        self._count += 1
        length = self._answer if most is None else most
        params = SamplingParams(temperature=1.0, seed=self._count, max_tokens=length, ignore_eos=True)
        (output,) = self.llm.generate([prompt], params, use_tqdm=False)
        return output.outputs[0].token_ids, output.num_cached_tokens

    def restart(self) -> None:
        self.close()
        self.llm = make_engine(self._model, self._memory)

    def close(self) -> None:
        self.llm.close()


class Restartable(Protocol):
    """See `Engines`."""

    def ask(self, prompt: Tokens, most: int | None = None) -> tuple[Tokens, int]: ...
    def restart(self) -> None: ...
    def close(self) -> None: ...


def play(
    model: Path,
    memory: Memory,
    talk: Talk,
    patterns: Sequence[str],
    between: int = 0,
    make: Callable[[Path, Memory, int], Restartable] = Engines,
) -> Iterator[tuple[str, list[Asked]]]:
    """The requests of each pattern, whose sessions one engine plays one after the other.

    between: tokens of an unrelated prompt before each request. make: gives the engines.
    """
    engines = make(model, memory, talk.answer)
    player = Player(engines.ask)
    try:
        for name in patterns:
            restart = num_requests(PATTERNS[name](talk, name), talk.answer) - AFTER_RESTART

            def interrupt(number: int, name: str = name, restart: int = restart) -> None:
                if between:
                    engines.ask(talk.words(between, f"between {name} {number}"), 1)
                if number == restart and memory.kv_cache_dir is not None:
                    engines.restart()

            yield name, player.play(PATTERNS[name](talk, name), interrupt)
    finally:
        engines.close()


# ---- report


def _measure(args: argparse.Namespace, talk: Talk, memory: Memory) -> dict[str, dict[str, list[Asked]]]:
    """By family and pattern the requests."""
    found: dict[str, dict[str, list[Asked]]] = {}
    for family in args.families:
        with tempfile.TemporaryDirectory() as directory:
            model = write_model(Path(directory), family, talk)
            own = memory
            if memory.kv_cache_dir is not None:
                own = replace(memory, kv_cache_dir=memory.kv_cache_dir / f"{family} {memory.tokens}")
            found[family] = dict(play(model, own, talk, args.patterns, args.between))
    return found


def _print_table(found: Mapping[str, Mapping[str, list[Asked]]], patterns: Sequence[str]) -> None:
    print(f"| | {' | '.join(found)} |\n|{'---|' * (len(found) + 1)}")
    for pattern in patterns:
        print(f"| {pattern} | {' | '.join(cell(of_family[pattern]) for of_family in found.values())} |")
    print(flush=True)


def _plain(found: Mapping[str, Mapping[str, list[Asked]]]) -> dict[str, Any]:
    """By family and pattern the cell, and sums over all requests."""
    return {
        family: {
            pattern: {
                "cell": cell(asked),
                "worst_at_known_places": worst(asked, True),
                "worst_at_new_places": worst(asked, False),
                "requests": len(asked),
                "prompt_tokens": sum(each.prompt_len for each in asked),
                "old_tokens": sum(each.old for each in asked),
                "recomputed_tokens": sum(each.recomputed for each in asked),
            }
            for pattern, asked in rows.items()
        }
        for family, rows in found.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    talk = Talk()
    usual = Memory()
    parser = Parser(prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="models (default: all)")
    add("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS), help="of sessions (default: all)")
    add("--cache", nargs="+", type=share, default=[share("1")], help="shares of --tokens (default: 1)")
    add(
        "--tokens",
        type=positive,
        default=usual.tokens,
        help="of the KV cache, in each group (default: %(default)s)",
    )
    add("--offload", action="store_true", help="the KV cache is in host memory")
    add("--kv-cache-dir", type=Path, help="a directory for blocks on disk: restart before the last turns")
    add("--between", type=not_negative, default=8192, help="tokens of an unrelated prompt (default: %(default)s)")
    add("--system", type=positive, default=talk.system, help="tokens of the system prompt (default: %(default)s)")
    add("--turns", type=positive, default=talk.turns, help="of a session (default: %(default)s)")
    add("--max-num-seqs", type=positive, default=usual.max_num_seqs, help="bounds states (default: %(default)s)")
    add("--chunk", type=positive, default=usual.chunk, help="tokens of a step (default: %(default)s)")
    told = "measure the time to the first token with these real models instead (default: all)"
    add("--first-token", nargs="*", choices=REAL_MODELS, help=told)
    add("--session-tokens", type=positive, help="of the last prompt (default: 24,000 of gemma3, 7,000 of smollm2)")
    add("--llama-cpp", type=Path, metavar="PYTHON", help="the same by llama.cpp, in the environment of this Python")
    add_json_option(parser)
    return parser.run(argv, lambda args: _run(args) if args.first_token is None else _run_first_token(args))


def _run(args: argparse.Namespace) -> int:
    talk = Talk(system=args.system, turns=args.turns)
    results = {}
    for factor in args.cache:
        memory = Memory(int(args.tokens * factor), args.offload, args.kv_cache_dir, args.max_num_seqs, args.chunk)
        found = _measure(args, talk, memory)
        print(f"Old tokens computed again, {memory.tokens:,} tokens {'offloaded' if args.offload else 'resident'}:\n")
        _print_table(found, args.patterns)
        results[str(memory.tokens)] = _plain(found)
    write_json(args.output_json, args, machine_facts("cpu"), results=results)
    return 0


def _run_first_token(args: argparse.Namespace) -> int:
    results = []
    for model in args.first_token or REAL_MODELS:
        for found in measure(model, args.session_tokens, args.llama_cpp):
            results.append({**asdict(found), "ratio": found.ratio})
            print_row(
                f"{found.engine}, {model}",
                f"{found.turns[-1]:,.2f} s",
                f"of {found.full_prefill:,.2f} s ({found.ratio:.1%}), {found.prompt_len:,} tokens",
            )
    write_json(args.output_json, args, machine_facts("cpu"), results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
