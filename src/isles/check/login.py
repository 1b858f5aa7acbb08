"""What is checked on the node that submits: its versions, and the files that its nodes will see."""

from __future__ import annotations

from isles import __version__
from isles.check.conduct import files_args
from isles.check.course import Extent
from isles.check.finding import Finding
from isles.check.judge.files import judge_files, judge_hub
from isles.check.judge.versions import judge_versions
from isles.check.panel import Panel, Place
from isles.check.subject import Subject


def check_login(subject: Subject, place: Place, extent: Extent) -> list[Finding]:
    """Findings of a login node. Its memory and GPUs are not those of the job, and are left alone.

    Args:
        subject: what is checked.
        place: a conversation with it.
        extent: how long answers may take.
    """
    panel = Panel([place], [])
    facts = panel.ask("facts", timeout_s=extent.contact_s).answers()
    if not facts:
        return panel.findings
    files = panel.ask("files", lambda _: files_args(subject), timeout_s=extent.timeout_s)
    repos = subject.hub_repos()
    if repos:
        hub = panel.ask("hub", lambda _: {"repos": repos}, timeout_s=extent.timeout_s)
        panel.findings += judge_hub(hub.answers("hub.access"))
    panel.findings += judge_files(subject, files.answers("files.output"), panel.names)
    panel.findings += judge_versions(facts, {}, {}, __version__)
    return panel.findings
