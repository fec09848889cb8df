"""The command line's manners: help, options, errors in one line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from phasemesh.__main__ import build_parser
from phasemesh.cli.options import overlay
from phasemesh.config_table import table, with_table
from phasemesh.ports import free_port
from wire.config import known_variables

ROOT = Path(__file__).parents[2]
COMMANDS = ("up", "down", "status", "role", "chat", "bench", "doctor", "models")
TIMEOUT_S = 60.0


def phasemesh(*arguments: str, environ: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PHASEMESH_")}
    return subprocess.run(
        [sys.executable, "-m", "phasemesh", *arguments],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The error, after checking that it is one line and the exit status is not zero."""
    assert done.returncode != 0
    assert done.stderr.startswith("phasemesh: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_teaches_with_examples(command: str) -> None:
    done = phasemesh(command, "--help")
    assert done.returncode == 0
    assert f"examples:\n  phasemesh {command}" in done.stdout


def test_help_lists_every_command_and_the_first_steps() -> None:
    said = phasemesh("--help").stdout
    assert all(f"\n    {command} " in said for command in COMMANDS)
    assert "first steps:" in said


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("up", ()),
        ("down", ()),
        ("status", ()),
        ("role", ()),
        ("chat", ("Hello",)),
        ("doctor", ()),
        ("models", ("list",)),
    ],
)
def test_every_option_is_a_variable(command: str, words: tuple[str, ...]) -> None:
    parser = build_parser()
    arguments = parser.parse_args([command, *words])
    own = set(vars(arguments)) - {"handler", "flags", "question", "action", "name", "worker", "role"}
    assert own == set(arguments.flags) <= known_variables()
    for variable, flag in arguments.flags.items():
        value = "9"
        assert overlay(parser.parse_args([command, *words, flag, value]), {variable: "1", "HOME": "/"}) == {
            variable: value,
            "HOME": "/",
        }


@pytest.mark.parametrize(
    "command", [("status",), ("chat", "hello"), ("--help",), ("bench", "--help"), ("models", "list")]
)
def test_quick_commands_import_nothing_heavy(command: tuple[str, ...], tmp_path: Path) -> None:
    code = """
import sys
from phasemesh.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print([m for m in ("torch", "transformers", "numpy", "grpc", "aiohttp", "tokenizers") if m in sys.modules])
"""
    environ = {
        **os.environ,
        "PHASEMESH_STATE_DIR": str(tmp_path),
        "PHASEMESH_CACHE_DIR": str(tmp_path),
        "PHASEMESH_PORT": str(free_port(set())),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *command], env=environ, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        (("status",), {"PHASEMESH_PROT": "8001"}, "unknown variable PHASEMESH_PROT"),
        (("up", "--port", "http"), {}, "--port 'http': not a whole number"),
        (("up",), {"PHASEMESH_PORT": "http"}, "PHASEMESH_PORT='http': not a whole number"),
        (("up", "--workers", "0"), {}, "--workers '0': at least 1"),
        (("up", "--roles", "decode,prefill"), {}, "--roles 'decode,prefill': 2 role(s) for 1 worker(s), one for each"),
        (("up", "--roles", "boss"), {}, "--roles 'boss': 'boss' is not one of prefill, decode, both"),
        (("up", "--roles", "decode"), {}, "--roles 'decode': no worker can prefill; one must be prefill or both"),
        (("up",), {"PHASEMESH_WORKER_ROLE": "prefill"}, "PHASEMESH_WORKER_ROLE='prefill': no worker can decode"),
        (("role", "worker-1", "boss"), {}, "role 'boss': one of prefill, decode, both, default"),
        (("role",), {}, "name one with --redis-url"),
        (("role", "--redis-url", f"redis://127.0.0.1:{free_port(set())}/0"), {}, "phasemesh: redis://127.0.0.1:"),
        (("up", "--simulate", "maybe"), {}, "--simulate 'maybe': not on or off"),
        (("up", "--weight-dtype", "int4"), {}, "--weight-dtype 'int4': one of auto, float32, bfloat16, int8, float8"),
        (("up", "--activation-dtype", "int4"), {}, "--activation-dtype 'int4': one of auto, float32, bfloat16, int8"),
        (("up", "--itl-target-ms", "0.5"), {}, "--itl-target-ms '0.5': at least 1"),
        (("up", "--model", "/no/such/model"), {}, "'/no/such/model': no directory with a config.json"),
        (("up",), {"PHASEMESH_STEP_TOKEN_BUDGET": "x"}, "PHASEMESH_STEP_TOKEN_BUDGET='x'"),
        (("chat", "--url", "localhost", "hello"), {}, "not an http:// or https:// URL"),
        (("models", "pull", "gpt-5"), {}, "no model 'gpt-5' to pull"),
        (("models", "path", "gpt-5"), {}, "'gpt-5': no directory with a config.json"),
    ],
)
def test_an_error_is_one_line_that_names_its_cause(
    arguments: tuple[str, ...], environ: dict[str, str], expected: str, tmp_path: Path
) -> None:
    free = {"PHASEMESH_PORT": str(free_port(set())), "PHASEMESH_STATE_DIR": str(tmp_path)}
    assert expected in one_line(phasemesh(*arguments, environ={**free, **environ}))


def test_up_on_a_busy_port_says_which_and_starts_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = one_line(phasemesh("up", "--port", str(port), "--state-dir", str(tmp_path)))
    assert f"port {port} on 127.0.0.1 is in use; choose another with --port (PHASEMESH_PORT)" in said
    assert list((tmp_path / "logs").iterdir()) == []


def test_up_with_a_redis_that_does_not_answer_says_so(tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{free_port(set())}/0"
    environ = {"PHASEMESH_STATE_DIR": str(tmp_path), "PHASEMESH_PORT": str(free_port(set()))}
    assert f"Redis does not answer: {url}" in one_line(phasemesh("up", "--redis-url", url, environ=environ))


def test_chat_without_a_gateway_says_what_starts_one(tmp_path: Path) -> None:
    environ = {"PHASEMESH_STATE_DIR": str(tmp_path), "PHASEMESH_PORT": str(free_port(set()))}
    assert "`phasemesh up` starts a stack" in one_line(phasemesh("chat", "hello", environ=environ))


def test_doctor_finds_nothing_wrong_here(smollm2_dir: Path, tmp_path: Path) -> None:
    environ = {"PHASEMESH_STATE_DIR": str(tmp_path), "PHASEMESH_PORT": str(free_port(set()))}
    done = phasemesh("doctor", "--model", str(smollm2_dir), environ=environ)
    assert done.returncode == 0, done.stdout
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("ok")] == [
        "python",
        "torch",
        "redis",
        "ports",
        "model",
    ]


def test_doctor_says_what_to_do_about_each_problem(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        environ = {
            "PHASEMESH_STATE_DIR": str(tmp_path),
            "PHASEMESH_PORT": str(server.getsockname()[1]),
            "PHASEMESH_MODEL": "/no/such/model",
            "PHASEMESH_REDIS_URL": f"redis://127.0.0.1:{free_port(set())}/0",
            "PHASEMESH_DEVICE": "cuda:7",
            "CUDA_VISIBLE_DEVICES": "",
        }
        done = phasemesh("doctor", environ=environ)
    assert done.returncode == 1
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert failed == ["torch", "redis", "ports", "model"]
    assert done.stdout.count("→") == len(failed)


def test_doctor_looks_at_every_port_that_is_configured(smollm2_dir: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        environ = {
            "PHASEMESH_STATE_DIR": str(tmp_path),
            "PHASEMESH_PORT": str(free_port(set())),
            "PHASEMESH_WORKER_PORT": str(port),
            "PHASEMESH_MODEL": str(smollm2_dir),
        }
        done = phasemesh("doctor", environ=environ)
    assert done.returncode == 1
    assert f"FAIL  ports   port {port} on 127.0.0.1 is in use; choose another with PHASEMESH_WORKER_PORT" in done.stdout


def test_the_table_in_the_readme_is_that_of_the_code() -> None:
    readme = (ROOT / "README.md").read_text()
    assert with_table(readme) == readme, "make docs"
    assert all(f"`{variable}`" in table() for variable in known_variables())
