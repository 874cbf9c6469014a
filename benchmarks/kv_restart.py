"""A document after a restart: computed, read from `kv_cache_dir`, and restored by llama.cpp from a file of its state.

    python -m benchmarks.kv_restart MODEL [--gguf FILE --llama-python PYTHON] [--tokens 6000] [--rounds 2]

Every run is a process of its own. In turns: one that computes the document and saves it, one that restores it. MODEL
and FILE may be the same GGUF file. Seconds: to load the model, from there to the first token, and to save (of nanovllm
what is left to write when the engine is closed). The files are in the file system's cache when they are read.

    python -m benchmarks.kv_restart MODEL --decode [--decoded 256] [--rounds 5]

Decode of a document while it is written to a directory, beside the same without a directory, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def document(model: str, tokens: int) -> list[int]:
    """Token ids of a story, as many as asked for."""
    from nanovllm.apps.real_models.reading import story
    from nanovllm.text.tokenizer import HuggingFaceTokenizer, load_tokenizer

    tokenizer = load_tokenizer(model)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    ids: list[int] = tokenizer.tokenizer.encode(story())
    return (ids * (-(-tokens // len(ids))))[:tokens]


def bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def run_nanovllm(model: str, prompt: list[int], directory: Path | None, output: int) -> dict[str, Any]:
    from nanovllm import LLM, SamplingParams

    begin = time.perf_counter()
    llm = LLM(model, device="cpu", max_model_len=len(prompt) + 256, max_num_seqs=1, kv_cache_dir=directory)
    loaded = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, logprobs=1)
    result = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
    ended = time.perf_counter()
    llm.close()
    metrics = result.metrics
    completion = result.outputs[0]
    return {
        "load": loaded - begin,
        "first_token": metrics.ttft,
        "token": metrics.tpot,
        "save": time.perf_counter() - ended,
        "from_disk": metrics.cached_tokens_disk,
        "bytes": 0 if directory is None else bytes_in(directory),
        "answer": [completion.token_ids, completion.cumulative_logprob],
    }


def run_llama(model: str, prompt: list[int], path: Path) -> dict[str, Any]:
    """Restore the state from `path` if it is there, else compute it and save it before the last token."""
    import ctypes

    import llama_cpp

    begin = time.perf_counter()
    llm = llama_cpp.Llama(model_path=model, verbose=False, n_ctx=len(prompt) + 256, n_batch=2048, n_ubatch=512)
    loaded = time.perf_counter()
    document_ids = prompt[:-1]
    saved = 0.0
    context = llm._ctx.ctx
    if path.exists():
        ids = (llama_cpp.llama_token * len(prompt))()
        count = ctypes.c_size_t()
        restored = llama_cpp.llama_state_load_file(context, str(path).encode(), ids, len(prompt), ctypes.byref(count))
        assert restored and list(ids)[: count.value] == document_ids
        llm.n_tokens = count.value
        llm.input_ids[: count.value] = document_ids
    else:
        llm.eval(document_ids)
        computed = time.perf_counter()
        ids = (llama_cpp.llama_token * len(document_ids))(*document_ids)
        assert llama_cpp.llama_state_save_file(context, str(path).encode(), ids, len(document_ids))
        saved = time.perf_counter() - computed
    llm.eval(prompt[-1:])
    token = int(llm.sample(temp=0.0, repeat_penalty=1.0))
    return {
        "load": loaded - begin,
        "first_token": time.perf_counter() - loaded - saved,
        "save": saved,
        "bytes": path.stat().st_size,
        "answer": [token],
    }


def child(arguments: dict[str, Any], python: str = sys.executable) -> dict[str, Any]:
    """What a run in a process of its own says."""
    command = [python, "-m", "benchmarks.kv_restart", "--child", "-"]
    done = subprocess.run(command, input=json.dumps(arguments), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_child() -> None:
    asked = json.load(sys.stdin)
    path = None if asked["path"] is None else Path(asked["path"])
    if asked["engine"] == "llama.cpp":
        assert path is not None
        result = run_llama(asked["model"], asked["prompt"], path)
    else:
        result = run_nanovllm(asked["model"], asked["prompt"], path, asked["output"])
    print(json.dumps(result))


def write_results(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> None:
    from benchmarks.report import machine_facts, write_json

    version = "import importlib.metadata as packages; print(packages.version('llama_cpp_python'))"
    others = {}
    if args.gguf is not None:
        others["llama_cpp_python"] = subprocess.check_output([args.llama_python, "-c", version], text=True).strip()
    write_json(args.output_json, args, machine_facts("cpu"), **others, results=found)


def restarts(model: str, gguf: str | None, python: str, prompt: list[int], rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {}
    engines = [("nanovllm", model, sys.executable), *([("llama.cpp", gguf, python)] if gguf is not None else [])]
    for _ in range(rounds):
        for engine, of_engine, interpreter in engines:
            with tempfile.TemporaryDirectory() as folder:
                path = str(Path(folder) / "kv")
                asked = {"engine": engine, "model": of_engine, "prompt": prompt, "path": path, "output": 2}
                runs = [child(asked, interpreter) for _ in range(2)]
            assert runs[0]["answer"] == runs[1]["answer"], f"{engine} answers otherwise after a restart"
            for which, result in zip(("computed", "restored"), runs, strict=True):
                found.setdefault(f"{engine}, {which}", []).append(result)
                print(engine, which, {name: value for name, value in result.items() if name != "answer"}, flush=True)
    return found


def decodes(model: str, prompt: list[int], rounds: int, decoded: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {"with a directory": [], "without": []}
    for _ in range(rounds):
        for name, runs in found.items():
            with tempfile.TemporaryDirectory() as folder:
                path = str(Path(folder) / "kv") if name == "with a directory" else None
                asked = {"engine": "nanovllm", "model": model, "prompt": prompt, "path": path, "output": decoded}
                runs.append(child(asked))
            print(name, f"{1000 * runs[-1]['token']:.2f} ms a token", flush=True)
    medians = {name: statistics.median(run["token"] for run in runs) for name, runs in found.items()}
    print({name: f"{1000 * seconds:.2f} ms" for name, seconds in medians.items()})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--gguf", help="the same model for llama.cpp")
    parser.add_argument("--llama-python", default=sys.executable, help="of an environment with llama-cpp-python")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--decoded", type=int, default=256, help="tokens of a decode run")
    parser.add_argument("--output-json", type=Path, help="where the results go")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        run_child()
        return
    prompt = document(args.model, args.tokens)
    if args.decode:
        found = decodes(args.model, prompt, args.rounds, args.decoded)
    else:
        found = restarts(args.model, args.gguf, args.llama_python, prompt, args.rounds)
    write_results(args, found)


if __name__ == "__main__":
    main()
