#!/usr/bin/env python3
"""Fails if the committed golden.bin is not what make_golden.py makes."""

import pathlib
import subprocess
import sys

script = pathlib.Path(__file__).with_name("make_golden.py")
sys.exit(subprocess.run([sys.executable, str(script), "--check"], check=False).returncode)
