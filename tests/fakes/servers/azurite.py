"""Azurite, Azure's own emulator, where it is installed (`npm install -g azurite`)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from urllib.request import Request, urlopen

from tests.fakes.servers.processes import free_port, running_server

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # known to all
_VERSION = "2021-08-06"


def find_azurite() -> str | None:
    """Return the command, from `PATH` or `AZURITE` (a folder)."""
    return shutil.which("azurite-blob", path=f"{os.environ.get('AZURITE', '')}:{os.environ.get('PATH', '')}")


@contextmanager
def azurite(command: str, folder: Path, *containers: str) -> Iterator[str]:
    """Yield the endpoint of an emulator with these containers."""
    port = free_port()
    options = ["--blobPort", str(port), "--location", str(folder), "--skipApiVersionCheck", "--disableTelemetry"]
    with running_server([command, *options], port, folder / "azurite.log"):
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        for container in containers:
            _create(endpoint, container)
        yield endpoint


def _create(endpoint: str, container: str) -> None:
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _VERSION}
    signed = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    resource = f"/{ACCOUNT}/{ACCOUNT}/{container}\nrestype:container"
    text = "PUT" + "\n" * 12 + signed + resource
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
    url = f"{endpoint}/{container}?restype=container"
    with urlopen(Request(url, method="PUT", headers=headers)):
        pass
