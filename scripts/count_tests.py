"""Counts test cases: count_tests.py RESULTS_DIR, a folder with GoogleTest's and pytest's XML files and CTest's ctest.junit
(if CTest ran them).

Prints "N passed, N failed" (and the skipped ones, if any); exits with 1 if a test failed or none ran.
"""

import pathlib
import sys
import xml.etree.ElementTree as ET


def main():
    results = pathlib.Path(sys.argv[1])
    passed, failed, skipped = 0, 0, 0
    gtest_names = set()
    for path in results.glob("*.xml"):
        root = ET.parse(path).getroot()
        gtest_names.add(path.stem)
        for case in root.iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                failed += 1
            elif case.get("result") == "skipped" or case.find("skipped") is not None:
                skipped += 1
            elif case.get("status", "run") == "run":  # pytest gives no status
                passed += 1
    junit = results / "ctest.junit"
    for case in ET.parse(junit).getroot().iter("testcase") if junit.exists() else ():
        name = case.get("name")
        if case.get("status") == "fail":
            # A crash or timeout leaves no XML, or one without the failing case: count the executable once.
            if name not in gtest_names or not has_failure(results / f"{name}.xml"):
                failed += 1
        elif name not in gtest_names:
            passed += 1
    skipped_note = f", {skipped} skipped" if skipped else ""
    print(f"{passed} passed, {failed} failed{skipped_note}")
    return 1 if failed or not passed else 0


def has_failure(path):
    cases = ET.parse(path).getroot().iter("testcase")
    return any(case.find("failure") is not None or case.find("error") is not None for case in cases)


if __name__ == "__main__":
    sys.exit(main())
