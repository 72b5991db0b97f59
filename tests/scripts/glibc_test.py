#!/usr/bin/env python3
"""What scripts/glibc_stubs.py links runs with an old glibc, and scripts/wheel_symbols.py sees what does not."""

from __future__ import annotations

import ctypes
import pathlib
import subprocess
import sys
import tempfile
import unittest
import zipfile

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"
# exp() is newer than 2.28 in libm and pthread_create() in libc; both were there before, under other versions.
OLD = """#include <math.h>
#include <pthread.h>
double f(double x, void *p) { return exp(x) + (p == (void *)pthread_create); }
"""
NEW = "int arc4random(void);\nint g(void) { return arc4random(); }\n"  # of 2.36


def run(*command: str | pathlib.Path) -> subprocess.CompletedProcess:
    """Runs a command."""
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


class Glibc(unittest.TestCase):
    """A library made with the stubs, or without, in a wheel."""

    def setUp(self) -> None:
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)
        self.stubs = self.folder / "stubs"
        result = run(sys.executable, SCRIPTS / "glibc_stubs.py", "2.28", self.stubs)
        self.assertEqual(result.returncode, 0, result.stdout)

    def link(self, source: str, *options: str) -> subprocess.CompletedProcess:
        """Links x.so out of a source."""
        (self.folder / "x.c").write_text(source, encoding="utf-8")
        flags = ["-shared", "-fPIC", "-Wl,-z,defs", *options]
        return run("cc", *flags, "-o", self.folder / "x.so", self.folder / "x.c", "-lm")

    def check(self, tag: str) -> subprocess.CompletedProcess:
        """What the script says of x.so in a wheel of a tag."""
        wheel = self.folder / f"x-1-py3-none-{tag}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.write(self.folder / "x.so", "x/lib/x.so.1")
        return run(sys.executable, SCRIPTS / "wheel_symbols.py", wheel)

    def test_what_the_stubs_link_needs_no_newer_glibc(self) -> None:
        linked = self.link(OLD, f"-L{self.stubs}")
        self.assertEqual(linked.returncode, 0, linked.stdout)
        self.assertEqual(self.check("manylinux_2_28_x86_64").returncode, 0)
        self.assertEqual(self.check("manylinux_2_27_x86_64.manylinux_2_28_x86_64").returncode, 0)
        # It is this machine's glibc that runs it, by the same names and versions.
        function = ctypes.CDLL(str(self.folder / "x.so")).f
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_double, ctypes.c_void_p]
        self.assertEqual(function(0.0, None), 1.0)

    def test_without_them_the_wheel_is_refused(self) -> None:
        self.assertEqual(self.link(OLD).returncode, 0)
        result = self.check("manylinux_2_28_x86_64")
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stdout, r"GLIBC_2\.\d+ for x/lib/x.so.1\nx-1-.*whl promises glibc 2.28\n")

    def test_what_2_28_lacks_does_not_link(self) -> None:
        result = self.link(NEW, f"-L{self.stubs}")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("arc4random", result.stdout)

    def test_a_wheel_without_a_promise_is_refused(self) -> None:
        self.assertEqual(self.link(OLD, f"-L{self.stubs}").returncode, 0)
        self.assertIn("has no manylinux tag", self.check("linux_x86_64").stdout)


if __name__ == "__main__":
    unittest.main()
