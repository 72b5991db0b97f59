"""The examples run as they are, and the README shows the NumPy one's real output."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(name):
    result = subprocess.run([sys.executable, ROOT / "python/examples" / name], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_numpy():
    assert "lengths [304, 74], 3.2x smaller than bf16" in run("numpy_decode.py")


def test_torch():
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    assert "6 compiled steps agree" in run("torch_decode.py")


def test_jax():
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed")
    os.environ["JAX_PLATFORMS"] = "cpu"
    said = run("jax_decode.py")  # how JAX writes its device depends on its version
    assert any(f"bfloat16 on {device}" in said for device in ("TFRT_CPU_0", "cpu:0"))


def test_readme_quick_start():
    section = (ROOT / "README.md").read_text().partition("## In Python")[2]
    code, output = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", section, re.S).groups()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, output), result.stderr
    call, error = re.search(r"and `(.*?)` raises\s`(.*?)`", section).groups()
    result = subprocess.run([sys.executable, "-c", f"{code}\n{call}"], capture_output=True, text=True)
    assert result.stderr.strip().endswith(error)
