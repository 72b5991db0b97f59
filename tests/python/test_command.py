"""cli/launch.py, which a wheel installs as the halftone command."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / "cli/launch.py"

if "HALFTONE_COMMAND" not in os.environ:
    pytest.skip("the halftone command is not built (HALFTONE_COMMAND)", allow_module_level=True)


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, LAUNCH, *arguments], capture_output=True, text=True, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("arguments", [["--version"], ["formats", "--json"], ["formats", "--kv-heads", "0"], ["é"]])
def test_says_what_the_command_says(arguments):
    command = subprocess.run([os.environ["HALFTONE_COMMAND"], *arguments], capture_output=True, text=True)
    result = run(*arguments)
    assert (result.returncode, result.stdout, result.stderr) == (command.returncode, command.stdout, command.stderr)


def test_evaluates_a_capture(tmp_path):
    capture = ROOT / "data/llama-tiny-capture.safetensors"
    result = run("eval", capture, "--formats", "int8-head", "--html", tmp_path / "report.html")
    assert result.returncode == 0 and "int8-head" in result.stdout, result.stderr
    assert (tmp_path / "report.html").stat().st_size > 0


def test_imports_no_package():
    code = f"import runpy, sys; x = runpy.run_path({str(LAUNCH)!r}); x['load'](); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"halftone", "tvm_ffi", "numpy", "torch"} & set(modules)


def test_a_closed_pipe_ends_it_quietly():
    with subprocess.Popen(
        [sys.executable, LAUNCH, "formats"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_a_library_that_is_not_there_is_named(tmp_path):
    result = run("formats", HALFTONE_PYTHON_LIBRARY=str(tmp_path / "none.so"))
    assert result.returncode == 1
    assert "none.so" in result.stderr and result.stderr.strip().endswith("install halftone-attention again.")
