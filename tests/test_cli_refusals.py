"""What `nanovllm generate` refuses at once, in one sentence and before a model is loaded; and help, as quickly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from cli_helpers import generate, json_lines, set_stdin, write_jsonl

from nanovllm.apps.cli.main import main
from nanovllm.engine.model_runner import ModelRunner


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--model", "{model}", "--temprature", "1", "x"], "'--temprature': did you mean --temperature?"),
        (["--model", "{model}", "--zzzz"], "see nanovllm generate --help"),
        (["--model", "{model}", "--kv-cache-tipe", "auto"], "'--kv-cache-tipe': did you mean --kv-cache-dtype?"),
        (["--model", "{model}", "x", "--quantization", "awq"], "quantization='awq': the checkpoint is not quantized"),
        (["--model", "{model}", "x", "--no-enable-chunked-prefill"], "enable_chunked_prefill=False is not supported"),
        (["--model", "{model}", "x", "--cpu-offload-gb", "4"], "cpu_offload_gb=4 is not supported: leave it out"),
        (["--model", "{model}", "x", "--block-size", "7"], "kvcache_block_size=7: must be"),
        ([], "no model is given: name it first, as in nanovllm generate DIR, or with --model DIR"),
        (["x"], "there is no prompt for the model 'x'"),
        (["{model}", "--model", "{dir}", "x"], "the model is given twice, as '{model}' and --model '{dir}': give one"),
        (["{model}", "--temp", "1", "x"], "'--temp': did you mean --temperature?"),
        (["{model}", "x", "--attention-backend", "FLASH"], "attention_backend='FLASH' is not supported: leave it out"),
        (["{model}", "x", "--guided-json", "{{}}"], "guided_json is not supported: use structured_outputs"),
        (["{model}", "x", "--reasoning-effort", "low"], "reasoning_effort is not supported: use chat_template_kwargs"),
        (
            ["{model}", "x", "--rope-scaling", "{{}}", "--rope-theta", "5"],
            "rope_theta=5 is not supported: use hf_overrides",
        ),
        (
            ["{model}", "x", "--no-enable-cpu-offload", "--kv-offloading-size", "1"],
            "--no-enable-cpu-offload: --kv-offloading-size is the memory of offloaded KV: leave one out",
        ),
        (["--model", "{dir}/nothing", "x"], "is not a directory: give the path"),
        (["--model", "{dir}", "x"], "config.json does not exist"),
        (["--model", "{model}", "--file", "{dir}/nothing"], "nothing' cannot be read: No such file or directory"),
        (["--model", "{model}", "--lines", "{dir}"], "cannot be read: Is a directory"),
        (["--model", "{model}", "--file", "-", "-"], "standard input can be read once only"),
        (["--model", "{model}", "x", "--output", "{dir}/no/where"], "cannot be written: No such file or directory"),
        (["--model", "{model}", "--file", "{dir}/file", "--output", "{dir}/file"], "is also read"),
        (["--model", "{model}", "x", "--stream", "--json"], "leave one of them out"),
        (["--model", "{model}", "x", "--stream", "--n", "2"], "n=2: --stream shows one sequence"),
        (["--model", "{model}", "x", "--temperature", "-1"], "temperature=-1.0: must be"),
        (["--model", "{model}", "x", "--num-cpu-blocks", "8"], "num_cpu_blocks=8: needs enable_cpu_offload"),
        (["--model", "{model}", "x", "--dtype", "int8"], "dtype='int8': must be one of"),
        (["--model", "{model}", "x", "--chat-template", "{dir}/nothing"], "--chat-template"),
        (["--model", "{model}", "x", "--stop", "\udcff"], "is not valid UTF-8"),
        (["--model", "{model}"], "there is no prompt"),
    ],
)
def test_refusals_cost_one_sentence_and_no_model(
    model: str,
    options: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("text")
    monkeypatch.setattr(ModelRunner, "execute", None)
    set_stdin(monkeypatch, b"", is_terminal=True)
    try:
        code: object = main(["generate", *(option.format(model=model, dir=tmp_path) for option in options)])
    except SystemExit as stopped:
        code = stopped.code
    printed = capsys.readouterr()
    assert code == 2 and printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("nanovllm generate: error: ")
    assert told.format(model=model, dir=tmp_path) in printed.err
    assert (tmp_path / "file").read_text() == "text"


def test_without_a_command_the_commands_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    told = "no command is given: name one of generate, chat, serve, batch, plan, bench, or see"
    assert told in capsys.readouterr().err


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path, vocab=97)
    capsys.readouterr()
    jsonl = write_jsonl(tmp_path / "p.jsonl", {"prompt_token_ids": [1, 2]})
    assert generate(str(tmp_path), "text") == 2
    assert generate(str(tmp_path), "--jsonl", jsonl) == 2
    told = capsys.readouterr().err
    assert told.count("has no tokenizer files") == told.count("\n") == 2
    assert generate(str(tmp_path), "--jsonl", jsonl, "--json", "--dtype", "float32") == 0
    (result,) = json_lines(capsys.readouterr().out)
    assert len(result["outputs"][0]["token_ids"]) == 6


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from nanovllm.apps.cli.main import main\n"
        "for words in (['--help'], ['generate', '--help'], ['chat', '--help'], ['bench', '--help']):\n"
        "    try: main(words)\n"
        "    except SystemExit as stopped: assert stopped.code == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    for command_name in ("generate", "chat", "plan", "bench"):
        assert command_name in done.stdout
