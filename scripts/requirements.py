"""Print requirements of pyproject.toml, one per line.

Usage: requirements.py [build] [project] [EXTRA ...] [--without NAME ...]
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Print the wanted sections without the names after --without."""
    cut = arguments.index("--without") if "--without" in arguments else len(arguments)
    sections, without = arguments[:cut], set(arguments[cut + 1 :])
    data = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    lists = {
        "build": [*data["build-system"]["requires"], "cmake", "ninja"],
        "project": data["project"]["dependencies"],
        **data["project"]["optional-dependencies"],
    }
    for section in sections:
        for requirement in lists[section]:
            if re.split(r"[^\w-]", requirement, maxsplit=1)[0] not in without:
                sys.stdout.write(f"{requirement}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
