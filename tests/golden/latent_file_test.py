#!/usr/bin/env python3
"""Fails if the committed latent.bin is not what make_latent.py makes."""

import pathlib
import subprocess
import sys

script = pathlib.Path(__file__).with_name("make_latent.py")
sys.exit(subprocess.run([sys.executable, str(script), "--check"], check=False).returncode)
