#!/usr/bin/env python3
"""What scripts/kernel_sizes.sh reports of a build folder."""

from __future__ import annotations

import pathlib
import subprocess
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "kernel_sizes.sh"
OBJECTS = "CMakeFiles/halftone_objects.dir/src/cuda"
HEADER = ["device", "code", "KiB", "s", "kernels", "KiB/kernel", "s/kernel"]


class KernelSizes(unittest.TestCase):
    """A folder with two objects: of one there is PTX, of the other there are the symbols alone."""

    def setUp(self) -> None:
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)
        self.compile("decode/a", 8)
        ptx = self.folder / "ptx/src/cuda/decode/a.cu/a.ptx"
        ptx.parent.mkdir(parents=True)
        ptx.write_text(".visible .entry f(\n)\n{\n}\n.func g()\n{\n}\n" * 4, encoding="utf-8")
        # nvcc leaves a function, variables of it, or both, for each kernel.
        symbols = ("_Z17__device_stub__f1v", "_Z17__device_stub__f1v.cold", "_ZZL17__device_stub__f2vE5__tmp")
        self.compile("latent/b", 3, *symbols)

    def compile(self, name: str, kib: int, *symbols: str) -> None:
        """An object with so much device code and symbols of functions."""
        made = self.folder / OBJECTS / f"{name}.cu.o"
        made.parent.mkdir(parents=True)
        source = f'char code[{1024 * kib}] __attribute__((section(".nv_fatbin")));\n'
        source += "".join(f'void f{i}(void) __asm__("{s}");\nvoid f{i}(void) {{}}\n' for i, s in enumerate(symbols))
        subprocess.run(["cc", "-c", "-x", "c", "-o", made, "-"], input=source, text=True, check=True)

    def log(self, *lines: tuple[int, int, str]) -> None:
        """Ninja's log, of objects that were begun and ended at a millisecond."""
        rows = [f"{begin}\t{end}\t1\t{OBJECTS}/{name}.cu.o\tabc\n" for begin, end, name in lines]
        (self.folder / ".ninja_log").write_text("# ninja log v5\n" + "".join(rows), encoding="utf-8")

    def report(self) -> list[list[str]]:
        """Its lines, as words."""
        run = subprocess.run(["bash", SCRIPT, self.folder], stdout=subprocess.PIPE, text=True, check=True)
        return [line.split() for line in run.stdout.splitlines()]

    def test_the_last_compilation_counts(self) -> None:
        self.log((0, 9000, "decode/a"), (500, 1700, "latent/b"), (100, 6100, "decode/a"))
        expected = [
            HEADER,
            ["decode/a", "8", "6.0", "4", "2.0", "1.5"],
            ["latent/b", "3", "1.2", "2", "1.5", "0.6"],
            ["total", "11", "7.2", "6", "1.8", "1.2"],
        ]
        self.assertEqual(self.report(), expected)

    def test_objects_of_another_build_have_no_time(self) -> None:
        self.log((0, 5000, "latent/b"))
        expected = [
            HEADER,
            ["decode/a", "8", "-", "4", "2.0", "-"],
            ["latent/b", "3", "5.0", "2", "1.5", "2.5"],
            ["total", "11", "5.0", "6", "1.8", "2.5"],  # of the kernels whose time is known
        ]
        self.assertEqual(self.report(), expected)

    def test_a_build_without_a_log(self) -> None:
        self.assertEqual(self.report()[-1], ["total", "11", "-", "6", "1.8", "-"])

    def test_no_objects(self) -> None:
        run = subprocess.run(["bash", SCRIPT, self.folder / "ptx"], stderr=subprocess.PIPE, text=True, check=False)
        self.assertNotEqual(run.returncode, 0)
        self.assertIn("no objects of .cu files", run.stderr)


if __name__ == "__main__":
    unittest.main()
