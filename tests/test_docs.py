"""The documentation is true: blocks marked `<!-- run -->` in README.md and docs/ are run here.

Python blocks of one page run one after the other, in one namespace and one event loop, `await`
allowed. Bash blocks run with `bash -eu`. Both start in an empty folder. `<!-- run: torch -->` and
`<!-- run: model -->` put the page's blocks under that pytest marker. A block after
`<!-- file: PATH -->` is that file. Links between pages must lead
somewhere.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^<!-- run(?:: (?P<mark>torch|model))? -->\n```(?P<kind>python|bash)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LISTING = re.compile(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")


@dataclass
class Page:
    """The runnable blocks of one page."""

    path: Path
    python: str = ""  # with empty lines before and between, so that line numbers are the page's
    bash: list[str] = field(default_factory=list)
    marks: set[str] = field(default_factory=set)


def read_page(path: Path) -> Page:
    page, text = Page(path), path.read_text()
    for found in BLOCK.finditer(text):
        if found["mark"]:
            page.marks.add(found["mark"])
        if found["kind"] == "bash":
            page.bash.append(found["code"])
            continue
        line = text.count("\n", 0, found.start("code"))
        page.python += "\n" * (line - page.python.count("\n")) + found["code"]
    return page


def cases(kind: str) -> list[Any]:
    pages = [read_page(path) for path in PAGES]
    return [
        pytest.param(page, id=page.path.name, marks=[getattr(pytest.mark, m) for m in page.marks])
        for page in pages
        if getattr(page, kind)
    ]


async def execute(page: Page) -> dict[str, Any]:
    """Run a page's Python blocks; return their namespace."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(page.python, str(page.path), "exec", flags=flags, dont_inherit=True)
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    result = eval(code, namespace)
    if inspect.iscoroutine(result):
        await result
    return namespace


@pytest.mark.parametrize("page", cases("python"))
async def test_python_blocks_run(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await execute(page)


@pytest.mark.parametrize("page", cases("bash"))
def test_bash_blocks_run(page: Page, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    for code in page.bash:
        subprocess.run(
            ["bash", "-eu", "-c", code],
            cwd=tmp_path,
            env={"PATH": path, "HOME": str(tmp_path)},
            check=True,
            timeout=100,
        )


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = [path.parent / link for link in LINK.findall(path.read_text())]
    assert [str(target) for target in targets if not target.exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_listings_are_the_files_that_they_name(path: Path) -> None:
    for name, text in LISTING.findall(path.read_text()):
        assert text == (ROOT / name).read_text(), f"{path.name} shows another {name}"


async def test_a_wrong_page_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(
        "# Title\n\n```python\nraise SystemExit\n```\n\n<!-- run -->\n```python\nx = 1\n```\n\n"
        "<!-- run: torch -->\n```python\nimport asyncio\n"
        "await asyncio.sleep(0)\nassert x == 2\n```\n"
    )
    page = read_page(path)
    assert page.marks == {"torch"}
    with pytest.raises(AssertionError) as caught:
        await execute(page)
    line = path.read_text().splitlines().index("assert x == 2") + 1
    assert caught.traceback[-1].lineno + 1 == line
