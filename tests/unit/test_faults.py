"""Every fault of tests/faults.py has its place in the code; `python -m tests.faults` tries them."""

from __future__ import annotations

from tests.faults import FAULTS, ROOT, SOURCE


def test_each_fault_has_its_place_and_its_tests() -> None:
    wrong = []
    for fault in FAULTS:
        found = (SOURCE / fault.file).read_text(encoding="utf-8").count(fault.old)
        if found != 1:
            wrong.append(f"{fault.name}: {found} times in {fault.file}")
        wrong += [
            f"{fault.name}: no {test}"
            for test in fault.tests.split()
            if not (ROOT / test.partition("::")[0]).exists()
        ]
    assert not wrong, "\n".join(wrong)
