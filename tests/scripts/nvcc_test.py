#!/usr/bin/env python3
"""cmake/nvcc.sh in front of a compiler that says what ptxas does."""

import pathlib
import subprocess
import tempfile
import unittest

WRAPPER = pathlib.Path(__file__).parents[2] / "cmake/nvcc.sh"
SERIAL = ("ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
          "insufficient register resources for the wgmma pipeline in the function 'f'")
INJECTED = "ptxas info    : (C7517) warpgroup.wait is injected in around line 58 by compiler"
VERBOSE = "ptxas info    : Used 252 registers, used 1 barriers"


class NvccTest(unittest.TestCase):
    def compile(self, notes: str, status: int = 0) -> tuple[subprocess.CompletedProcess, bool]:
        """What became of a compilation with these notes, and whether its object is there."""
        with tempfile.TemporaryDirectory() as folder:
            compiler, made = pathlib.Path(folder) / "compiler", pathlib.Path(folder) / "an object.o"
            compiler.write_text(f'#!/bin/sh\necho made\necho "{notes}" >&2\ntouch "$3"\nexit {status}\n')
            compiler.chmod(0o755)
            ran = subprocess.run([WRAPPER, compiler, "-c", "-o", made, "x.cu"], capture_output=True, text=True)
            return ran, made.exists()

    def test_others_pass_as_they_are(self) -> None:
        ran, made = self.compile(VERBOSE)
        self.assertEqual((ran.returncode, ran.stdout, ran.stderr, made), (0, "made\n", VERBOSE + "\n", True))

    def test_an_error_stays_one(self) -> None:
        ran, _ = self.compile(SERIAL, 255)
        self.assertEqual((ran.returncode, ran.stderr), (255, SERIAL + "\n"))

    def test_notes_about_lost_speed_are_errors(self) -> None:
        for note in (SERIAL, INJECTED, f"{VERBOSE}\n{SERIAL}"):
            with self.subTest(note=note):
                ran, made = self.compile(note)
                self.assertEqual((ran.returncode, ran.stdout, made), (1, "made\n", False))
                self.assertTrue(ran.stderr.startswith(note + "\nnvcc.sh: error: "), ran.stderr)
                self.assertIn("-DHALFTONE_WERROR=OFF", ran.stderr)


if __name__ == "__main__":
    unittest.main()
