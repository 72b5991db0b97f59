#!/usr/bin/env python3
"""scripts/check_includes.py finds what is planted in a small house, and nothing else."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts/check_includes.py"

# A file in every kind of room, all of whose includes point down.
SOUND = {
    "include/halftone/types.h": "#include <cstdint>\n",
    "include/halftone/cache.h": '#include "halftone/types.h"\n',
    "src/format/codec.h": '#include "halftone/types.h"\n',
    "src/plan/work.h": '#include "format/codec.h"\n',
    "src/cpu/run.cc": '#include "cpu/run.h"\n#include "plan/work.h"\n#include "hwy/highway.h"\n',
    "src/cpu/run.h": "",
    "src/cuda/backend.cc": '#include "cuda/decode/decode.h"\n',
    "src/cuda/decode/decode.h": '#include "cuda/attention/item.h"\n#include "cuda/device/ptx.h"\n',
    "src/cuda/prefill/prefill.h": '#include "cuda/attention/item.h"\n',
    "src/cuda/latent/host.cc": '#include "cuda/latent/wide/end.h"\n#include "cuda/latent/host.h"\n',
    "src/cuda/latent/host.h": "",
    "src/cuda/latent/wide/end.h": '#include "cuda/attention/item.h"\n',
    "src/cuda/latent/few/merge.h": '#include "cuda/attention/item.h"\n',
    "src/cuda/attention/item.h": '#include "cuda/device/ptx.h"\n',
    "src/cuda/device/ptx.h": '#include "plan/work.h"\n',
    "src/api.cc": '#include "cpu/run.h"\n#include "cuda/decode/decode.h"\n',
    "reference/oracle.h": '#include "halftone/types.h"\n',
    "testing/cases.h": '#include "reference/oracle.h"\n#include <halftone/cache.h>\n',
    "cli/cuda/read.cu": '#include "reference/oracle.h"\n#include "cuda/device/ptx.h"\n',
    "cli/text.h": "",
    "cli/commands/eval.cc": '#include "cli/eval/measure.h"\n#include "cli/terminal/table.h"\n',
    "cli/commands/command.h": "",
    "cli/eval/measure.h": '#include "cli/terminal/table.h"\n',
    "cli/terminal/table.h": "",
    "python/native/convert.cc": '#include "convert.h"\n#include "cpu/run.h"\n',
    "python/native/convert.h": "",
    "tests/cuda/read_test.cc": '#include "../tools.h"\n#include "cli/text.h"\n#include "plan/work.h"\n',
    "tests/tools.h": "",
    "build/generated/any.h": '#include "cli/text.h"\n',
}


class CheckIncludesTest(unittest.TestCase):
    def check(self, changed: dict[str, str]) -> tuple[int, list[str]]:
        """Exit status and lines of the script on the sound house with ``changed`` files."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in {**SOUND, **changed}.items():
                path = pathlib.Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            run = subprocess.run(
                [sys.executable, str(SCRIPT), folder], capture_output=True, text=True, check=False
            )
        self.assertEqual(run.stderr, "")
        return run.returncode, run.stdout.splitlines()

    def expect(self, name: str, text: str, *lines: str) -> None:
        """Exactly ``lines`` are printed when file ``name`` holds ``text``."""
        self.assertEqual(self.check({name: text}), (1, list(lines)))

    def test_the_sound_house(self) -> None:
        self.assertEqual(self.check({}), (0, ["every #include points down"]))

    def test_up(self) -> None:
        up = {
            "include/halftone/format.h": "format/codec.h",
            "src/format/page.h": "plan/work.h",
            "src/plan/plan.cc": "cuda/decode/decode.h",
            "src/plan/config.h": "cpu/run.h",
            "src/cuda/device/wgmma.h": "cuda/attention/item.h",
            "src/cuda/attention/mask.h": "cuda/decode/decode.h",
            "src/cpu/direct.cc": "testing/cases.h",
            "reference/oracle.cc": "testing/cases.h",
            "testing/cases.cc": "cli/text.h",
            "cli/main.cc": "tests/tools.h",
            "cli/eval/capture.cc": "cli/commands/command.h",
            "cli/terminal/text.cc": "cli/eval/measure.h",
            "src/cuda/latent/few/config.h": "cuda/latent/host.h",
            "src/cuda/latent/few/end.h": "cuda/latent/wide/end.h",
            "src/cuda/latent/wide/merge.h": "cuda/latent/few/merge.h",
            # beside
            "cli/bench/cpu.cc": "cli/eval/measure.h",
            "cli/eval/run.cc": "testing/cases.h",
            "src/cpu/merge.cc": "cuda/device/ptx.h",
            "src/cuda/merge.cu": "cpu/run.h",
            "src/cuda/prefill/load.h": "cuda/decode/decode.h",
            "reference/softmax.cc": "plan/work.h",
        }
        for name, included in up.items():
            with self.subTest(name):
                self.expect(name, f'\n#include "{included}"\n', f'{name}:2: includes "{included}", which is above')

    def test_however_it_is_written(self) -> None:
        for line in ("#include <cpu/run.h>", '  #  include "cpu/run.h"  // why', '#include "../cpu/run.h"'):
            with self.subTest(line):
                name = line.replace("<", '"').replace(">", '"').split('"')[1]
                self.expect("src/plan/a.h", line, f'src/plan/a.h:1: includes "{name}", which is above')

    def test_every_include_is_reported(self) -> None:
        self.expect(
            "src/format/a.h", '#include "cpu/run.h"\n#include "halftone/types.h"\n#include "plan/work.h"\n',
            'src/format/a.h:1: includes "cpu/run.h", which is above',
            'src/format/a.h:3: includes "plan/work.h", which is above',
        )  # fmt: skip

    def test_a_table_that_lets_rooms_include_each_other(self) -> None:
        spec = importlib.util.spec_from_file_location("check_includes", SCRIPT)
        assert spec and spec.loader
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        self.assertEqual(list(script.House("a b c/d\nb c/**\nc/** e\ne").rising()), [])
        house = script.House("a b\nb c/**\nc/d a\nc/e c/**\n")
        self.assertEqual(list(house.rising()), [("c/d", "a"), ("c/e", "c/d")])

    def test_a_folder_without_a_rule(self) -> None:
        for name in ("src/cuda/sparse/a.h", "extras/a.cc", "python/a.cc", "a.c"):
            with self.subTest(name):
                folder = pathlib.Path(name).parent.as_posix()
                self.expect(
                    name, "", f"{name}:1: is in {folder}, which has no rule: add one to scripts/check_includes.py"
                )


if __name__ == "__main__":
    unittest.main()
