"""Each extra alone: with only the packages that it and the core bring, the feature that it is named for runs. Slow.

The other installed packages are hidden, which shows the same as an environment of its own and downloads nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from pathlib import Path

import pytest
from cli_helpers import make_model
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_packaging import ROOT, tomllib
from tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.slow

HIDE = """
import sys
hidden = set(sys.argv[2].split(","))

class Others:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else self.finder.find_spec(name, path, target)

    def find_distributions(self, *given):
        return getattr(self.finder, "find_distributions", lambda *_: ())(*given)

sys.meta_path[:] = map(Others, sys.meta_path)
model = sys.argv[1]
cache = dict(device="cpu", kvcache_block_size=16, num_gpu_blocks=40)
"""
STRUCTURED = """
from nanovllm import LLM, SamplingParams
params = SamplingParams(max_tokens=9, stop_token_ids=[1], structured_outputs={"regex": "[ab]{3}"})
with LLM(model, **cache) as llm:
    assert set(llm.generate("x", params, use_tqdm=False)[0].outputs[0].text) <= {"a", "b"}
"""
SERVER = """
import json, threading, time, urllib.request
from nanovllm.apps.server.async_llm import AsyncLLM
from nanovllm.apps.server.run import Server, open_socket
from nanovllm.apps.server.settings import ServerSettings
settings = ServerSettings(served_model_names=("m",), port=0)
with AsyncLLM(model, **cache) as engine, open_socket(settings) as opened:
    server = Server(engine, settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()
    while not server.started:
        time.sleep(0.05)
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["yes", "no"]}}}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20, "stop_token_ids": [1]}
    data = json.dumps(body | {"response_format": schema}).encode()
    url = f"http://127.0.0.1:{opened.getsockname()[1]}/v1/chat/completions"
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(request))
    assert json.loads(answer["choices"][0]["message"]["content"]) in ("yes", "no")
    server.should_exit = True
    thread.join()
"""
PARQUET = """
import os, pyarrow as pa, pyarrow.parquet as pq, tempfile
from nanovllm.apps.cli.main import main
folder = tempfile.mkdtemp(dir=os.path.dirname(model))
pq.write_table(pa.table({"prompt": ["a", "b"]}), f"{folder}/in.parquet")
flags = ["--device=cpu", "--kvcache-block-size=16", "--num-gpu-blocks=40", "--max-tokens=3", "--ignore-eos"]
command = ["batch", "--model", model, "--input", f"{folder}/in.parquet", "--output", f"{folder}/out", *flags]
assert main(command) == 0
assert pq.read_table(f"{folder}/out/part-000000.parquet").num_rows == 2
"""
RAY = """
import os
from nanovllm.apps.cli.main import main
folder = os.path.dirname(model)
open(f"{folder}/in.jsonl", "w").write('{"prompt": "a"}\\n{"prompt": "b"}\\n')
flags = ["--device=cpu", "--kvcache-block-size=16", "--num-gpu-blocks=40", "--max-tokens=3", "--ignore-eos"]
command = ["batch", "--model", model, "--input", f"{folder}/in.jsonl", "--output", f"{folder}/by-ray", *flags]
assert main([*command, "--num-replicas=2"]) == 0
"""
GGUF = """
import os
from pathlib import Path
from nanovllm import LLM, SamplingParams
from nanovllm.apps.real_models.smollm2 import convert_gguf
folder = Path(model).parent
convert_gguf(folder / "tiny.gguf", folder / "converted")
with LLM(str(folder / "converted"), **cache) as llm:
    (output,) = llm.generate("x", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
"""
FEATURES = {
    "structured": STRUCTURED,
    "server": SERVER,
    "parquet": PARQUET,
    "ray": RAY,
    "gguf": GGUF,
}


def brought(extra: str | None) -> set[str]:
    """The distributions that the project brings with one extra, with all that they need. Skips if one is missing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for line in extras[extra] if extra else ():
        with suppress(PackageNotFoundError):
            version(Requirement(line).name)
            continue
        pytest.skip(f"{line} is not installed: pip install 'nanovllm[{extra}]'")
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(line) for line in (*project["dependencies"], *(extras[extra] if extra else ()))]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if (name, frozenset(wanted.extras)) in found:
            continue
        found.add((name, frozenset(wanted.extras)))
        try:
            lines = [] if name == "nanovllm" else requires(name) or []
        except PackageNotFoundError:
            lines = []  # an import of it fails
        if name == "nanovllm":
            waiting += [Requirement(line) for each in wanted.extras for line in extras[each]]
        for needed in map(Requirement, lines):
            markers = [{"extra": each} for each in ("", *wanted.extras)]
            if needed.marker is None or any(needed.marker.evaluate(marker) for marker in markers):
                waiting.append(needed)
    return {name for name, _ in found}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("extras")
    write_tiny_gguf(folder / "tiny.gguf")
    return make_model(folder / "model")


def run(extra: str | None, feature: str, model: str) -> subprocess.CompletedProcess[str]:
    """The feature in a process that has the packages of one extra, or of none."""
    own = brought(extra) | {"nanovllm"}
    if "ray" in own:
        own |= {"psutil", "colorama"}  # Ray has copies of both in its own folder
    hidden = [
        module
        for module, names in packages_distributions().items()
        if not own & {canonicalize_name(name) for name in names} and module not in sys.stdlib_module_names
    ]
    command = [sys.executable, "-c", HIDE + FEATURES[feature], model, ",".join(hidden)]
    environment = {**os.environ, "PYTHONPATH": str(Path(ROOT))}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("extra", FEATURES)
def test_an_extra_brings_what_its_feature_needs(extra: str, model: str) -> None:
    done = run(extra, extra, model)
    assert done.returncode == 0, done.stderr[-3000:]
    assert run(None, extra, model).returncode != 0, "the core alone does not have it, or nothing was hidden"
