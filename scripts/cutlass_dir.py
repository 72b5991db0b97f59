"""Prints the folder of this Python's nvidia-cutlass wheel that holds CUTLASS' include/."""

import importlib.metadata
import sys

header = "include/cutlass/cutlass.h"
for file in importlib.metadata.files("nvidia-cutlass") or []:
    if str(file).endswith(header):
        print(str(file.locate())[: -len("/" + header)])
        sys.exit(0)
sys.exit(f"the nvidia-cutlass package of {sys.executable} has no {header}")
