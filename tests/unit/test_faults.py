"""Every fault of tests/faults.py has its place in the code; `python -m tests.faults` tries them."""

from __future__ import annotations

from tests.faults import FAULTS, ROOT, SOURCE


def test_each_fault_has_its_place_and_its_tests():
    wrong = []
    for fault in FAULTS:
        found = (SOURCE / fault.file).read_text(encoding="utf-8").count(fault.old)
        if found != 1:
            wrong.append(f"{fault.name}: {found} times in {fault.file}")
        files = [ROOT / test.partition("::")[0] for test in fault.tests.split()]
        wrong += [f"{fault.name}: no {file}" for file in files if not file.exists()]
    assert not wrong, "\n".join(wrong)
