#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print the results of one ctest run, and append their sums to a file.

usage: count_results.py TITLE JUNIT COUNTS FAILURES

JUNIT is the output of `ctest --output-junit`, with the whole output of passed tests. A ctest test is usually a suite,
so its cases are counted from its output if it contains them: cmocka's summary, TAP (bats), or a line "N passed, N
failed" with or without ", N skipped". Others count as one. Prints one line for each suite, with the skipped and failed
cases below it; "passed failed skipped" is appended to COUNTS, and failures to FAILURES, for the end of the report.
"""
import re
import sys
import xml.etree.ElementTree as ElementTree

CMOCKA = {kind: re.compile(rf"\[  {kind} \] (\d+) test\(s\)") for kind in ("PASSED ", "FAILED ", "SKIPPED")}
CMOCKA_NAME = re.compile(r"\[  (FAILED |SKIPPED) \] ([A-Za-z_]\w*)$", re.MULTILINE)
TAP = re.compile(r"^(not ok|ok) \d+ (.*?)(?: # skip ?(.*))?$", re.MULTILINE)
TAP_PLAN = re.compile(r"^1\.\.(\d+)$", re.MULTILINE)
SUMMARY = re.compile(r"^(\d+) passed, (\d+) failed(?:, (\d+) skipped)?$", re.MULTILINE)


def count_cmocka(output):
    numbers = {kind.strip(): sum(map(int, pattern.findall(output))) for kind, pattern in CMOCKA.items()}
    if not any(numbers.values()):
        return None
    # cmocka repeats the failed and skipped cases below its summary.
    names = sorted({(kind.strip().lower(), name) for kind, name in CMOCKA_NAME.findall(output)})
    return numbers["PASSED"], numbers["FAILED"], numbers["SKIPPED"], [f"{kind}: {name}" for kind, name in names]


def count_tap(output):
    plan = TAP_PLAN.search(output)
    if not plan:
        return None
    passed = failed = skipped = 0
    notes = []
    for verdict, name, reason in (match.groups() for match in TAP.finditer(output)):
        if verdict == "not ok":
            failed += 1
            notes.append(f"failed: {name}")
        elif reason is not None:
            skipped += 1
            notes.append(f"skipped: {name} ({reason})")
        else:
            passed += 1
    lost = int(plan.group(1)) - passed - failed - skipped
    if lost > 0:
        failed += lost
        notes.append(f"failed: {lost} of {plan.group(1)} did not report")
    return passed, failed, skipped, notes


def count_summary(output):
    matches = SUMMARY.findall(output)
    return (*(int(number or 0) for number in matches[-1]), []) if matches else None


def count_not_run(case, output):
    """A ctest test that was skipped, with the reason on its last line, or one that could not start."""
    skipped = case.find("skipped")
    if skipped is None:
        return 0, 1, 0, [f"failed: {case.get('status')}"]
    lines = output.strip().splitlines()
    return 0, 0, 1, [f"skipped: {lines[-1] if lines else skipped.get('message', 'no reason given')}"]


def count_case(case):
    """(passed, failed, skipped, notes) of one ctest test."""
    status, output = case.get("status"), case.findtext("system-out") or ""
    if status in ("notrun", "disabled"):
        return count_not_run(case, output)

    passed, failed, skipped, notes = (
        count_tap(output) or count_cmocka(output) or count_summary(output) or (int(status == "run"), 0, 0, [])
    )
    if status != "run" and failed == 0:
        failure = case.find("failure")
        message = failure.get("message") if failure is not None else status
        failed, notes = 1, notes + [f"failed: {message or 'ended by its time limit or a signal'}"]
    return passed, failed, skipped, notes


def tail(case, lines):
    output = (case.findtext("system-out") or "").splitlines()[-lines:]
    return "".join(f"      | {line}\n" for line in output)


def main():
    title, junit, counts_path, failures_path = sys.argv[1:]
    totals, failures = [0, 0, 0], ""
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        name = case.get("name")
        *numbers, notes = count_case(case)
        remark = "FAILED" if numbers[1] else ""
        if remark:
            failures += f"  {title}: {name}: {remark}\n" + "".join(f"      {note}\n" for note in notes) + tail(case, 40)
        totals = [total + number for total, number in zip(totals, numbers)]
        counts_text = "{:5} passed {:3} failed {:3} skipped".format(*numbers)
        print(f"  {title}: {name:30} {counts_text} {float(case.get('time') or 0):7.1f} s {remark}".rstrip())
        for note in notes:
            print(f"      {note}")
        if remark:
            print(tail(case, 200), end="")
    with open(counts_path, "a", encoding="utf-8") as file:
        print(*totals, file=file)
    with open(failures_path, "a", encoding="utf-8") as file:
        file.write(failures)


if __name__ == "__main__":
    main()
