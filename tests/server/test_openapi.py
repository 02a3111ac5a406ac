"""The OpenAPI description against the code and, by schemathesis, against the real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, ServerProcess

import tfglm.server
from tfglm.server.app import make_app
from tfglm.server.schemas import ChatBody, CompletionBody, DetokenizeBody
from tfglm.server.state import ServerState
from tfglm.settings import Settings

FILE = Path(tfglm.server.__file__).parent / "openapi.json"
DOCUMENT = json.loads(FILE.read_text(encoding="utf-8"))


def test_every_route_is_described_and_nothing_else():
    app = make_app(ServerState(Settings()))
    routes = {
        (route.resource.canonical, route.method.lower()) for route in app.router.routes() if route.method != "HEAD"
    }
    assert routes == {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}


@pytest.mark.parametrize(
    ("name", "model"),
    [("ChatRequest", ChatBody), ("CompletionRequest", CompletionBody), ("DetokenizeRequest", DetokenizeBody)],
)
def test_every_field_is_described_and_nothing_else(name: str, model: Any):
    schema = DOCUMENT["components"]["schemas"][name]
    assert set(schema["properties"]) == set(model.model_fields)
    assert set(schema["required"]) == {key for key, value in model.model_fields.items() if value.is_required()}


async def test_it_is_served(make_api):
    assert await (await make_api()).get("/openapi.json") == (200, DOCUMENT)


def test_schemathesis_finds_no_fault(checkpoint: Path, tmp_path: Path):
    """A small window and a small budget bound the work of a generated request; the model's name is filled in, since no
    generator would guess it.

    One check is left out: it calls every 400 to a body that fits the schema a fault, but whether a prompt fits the
    window or an id is in the vocabulary is not for a schema to say.
    """
    document = json.loads(FILE.read_text(encoding="utf-8"))
    for name in ("ChatRequest", "CompletionRequest"):
        document["components"]["schemas"][name]["properties"]["model"] = {"enum": ["tiny"]}
    described = tmp_path / "openapi.json"
    described.write_text(json.dumps(document))
    flags = ("--port", "0", "--threads", "1", "--context", "256", "--max-tokens", "4")
    with ServerProcess("-m", "tfglm.cli.main", "serve", checkpoint, *flags) as server:
        url = server.wait_for(r"(http://[\d.]+:\d+)")
        command = ["run", str(described), "--url", url, "--max-examples", "4", "--seed", "1", "--no-color"]
        command += ["--exclude-checks", "positive_data_acceptance", "--request-timeout", "60"]
        done = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", *command],
            cwd=tmp_path,
            env={"PATH": "", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "16 selected / 16 total" in done.stdout
        assert server.process.poll() is None
