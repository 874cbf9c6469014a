"""TLS: which files are taken, and which clients may connect. The certificates are made with the program openssl."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from cli_helpers import make_model
from server_helpers import CACHE, listening, settings

from nanovllm.apps.server.async_llm import AsyncLLM
from nanovllm.errors import ConfigError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the server and for a client: a key, and a certificate that it signs itself."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(command: str) -> None:
        subprocess.run(["openssl", *command.split()], cwd=folder, capture_output=True, check=True)

    for name in ("server", "client"):
        openssl(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
            f"-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout {name}.key -out {name}.crt"
        )
    openssl("pkey -in server.key -aes256 -passout pass:secret -out encrypted.key")
    return folder


def given(files: Path, **names: str) -> dict[str, Any]:
    """The settings, with the paths of these files."""
    chosen = {"ssl_keyfile": "server.key", "ssl_certfile": "server.crt", **names}
    return {name: value if name == "ssl_keyfile_password" else str(files / value) for name, value in chosen.items()}


def test_files_that_cannot_be_used_are_refused_before_a_model_is_loaded(files: Path) -> None:
    encrypted = {"ssl_keyfile": "encrypted.key"}
    settings(**given(files, **encrypted, ssl_keyfile_password="secret"))
    for wrong in (
        {"ssl_keyfile": "client.key"},
        {"ssl_keyfile": "server.crt"},
        encrypted,
        {**encrypted, "ssl_keyfile_password": "wrong"},
        {"ssl_ca_certs": "client.key"},
    ):
        with pytest.raises(ConfigError, match="TLS cannot use"):
            settings(**given(files, **wrong))
    with pytest.raises(ConfigError, match="TLS needs both"):
        settings(ssl_ca_certs=str(files / "server.crt"))


def test_clients_without_a_certificate_of_the_named_cas_are_refused(files: Path, tmp_path: Path) -> None:
    trusted = ssl.create_default_context(cafile=str(files / "server.crt"))
    known = ssl.create_default_context(cafile=str(files / "server.crt"))
    known.load_cert_chain(files / "client.crt", files / "client.key")

    def health(port: int, context: ssl.SSLContext) -> int:
        with httpx.Client(verify=context) as client:
            return client.get(f"https://localhost:{port}/health").status_code

    with AsyncLLM(make_model(tmp_path / "model"), **CACHE) as engine:
        with listening(engine, **given(files)) as (_, port):
            assert health(port, trusted) == 200
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"http://localhost:{port}/health")
        with listening(engine, **given(files, ssl_ca_certs="client.crt")) as (_, port):
            with pytest.raises((httpx.HTTPError, ssl.SSLError)):
                health(port, trusted)
            assert health(port, known) == 200
