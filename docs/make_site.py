"""A hook of MkDocs: adds linked files of the repository and redirects to the site.

Pages link to files by their paths in the repository, such as `../examples/quickstart.yaml`. Each
such file gets a page with its text below files/; a folder leads to its README.md or run.yaml.
Each page in `MOVED` keeps its address, which redirects the browser.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^()#\s:]+)((?:#[^()\s]*)?\))")
# A removed page, and the page (with an anchor, if one fits) that has its text now.
MOVED = {
    "adapters.md": "fine-tuning.md#adapters",
    "hangs.md": "failures.md",
    "home-lab.md": "cookbook-three-home-pcs.md",
    "manual.md": "ssh.md#start-the-nodes-manually",
    "requirements.md": "architecture.md",
    "scale.md": "simulate.md",
    "shared-files.md": "ssh.md#hosts-without-a-shared-disk",
}
REDIRECT = """\
<!doctype html>
<meta charset="utf-8">
<title>Moved</title>
<meta http-equiv="refresh" content="0; url={url}">
<a href="{url}">This page has moved.</a>
"""
LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml", ".json": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside of docs/ that is linked to, also by such a file."""
    texts = [(_origin(file.src_uri), file.content_string) for file in files.documentation_pages()]
    seen: set[str] = set()
    while texts:
        origin, text = texts.pop()
        for _, link, _ in LINK.findall(text):
            target = _target(origin, link)
            if target is None or target.startswith("docs/") or target in seen:
                continue
            seen.add(target)
            page = _shown(target)
            added = File.generated(
                config, _page(target), content=page, inclusion=InclusionLevel.NOT_IN_NAV
            )
            files.append(added)
            if target.endswith(".md"):
                texts.append((target, page))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to the pages that the site has for them."""
    del config, files
    origin = _origin(page.file.src_uri)
    here = posixpath.dirname(page.file.src_uri) or "."

    def replaced(match: re.Match[str]) -> str:
        target = _target(origin, match[2])
        if target is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(_page(target), here)}{match[3]}"

    return LINK.sub(replaced, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Write a page for each removed page that leads to its successor."""
    for old, new in MOVED.items():
        page = Path(config.site_dir, old).with_suffix(".html")
        page.write_text(REDIRECT.format(url=new.replace(".md", ".html")), encoding="utf-8")


def _origin(src_uri: str) -> str:
    """Where a page of the site lies in the repository."""
    if not src_uri.startswith("files/"):
        return f"docs/{src_uri}"
    path = src_uri.removeprefix("files/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def _target(origin: str, link: str) -> str | None:
    """The file behind a link, from the root of the repository; None: there is none.

    A link that leads nowhere stays as it is: the build then names it, and fails.
    """
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
    if path.startswith(".."):
        return None
    names = (path, f"{path}/README.md", f"{path}/run.yaml")
    return next((name for name in names if (ROOT / name).is_file()), None)


def _page(target: str) -> str:
    """The page of the site for a file of the repository."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"files/{target}" if target.endswith(".md") else f"files/{target}.md"


def _shown(target: str) -> str:
    """The text of the page for a file outside of docs/."""
    text = (ROOT / target).read_text(encoding="utf-8")
    if target.endswith(".md"):
        return text
    language = LANGUAGES.get(posixpath.splitext(target)[1], "text")
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"# `{target}`\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"
