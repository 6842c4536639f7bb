"""Packages that are there for one test: `install` lays one into a folder, as pip would."""

from __future__ import annotations

from pathlib import Path

from flexkv import plugins


def install(
    site: Path,
    distribution: str,
    points: dict[str, str],
    modules: dict[str, str],
    group: str = plugins.POLICIES,
) -> None:
    """Lay a distribution into `site` as pip would: metadata, entry points, modules."""
    info = site / f"{distribution.replace('-', '_')}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    lines = "".join(f"{name} = {target}\n" for name, target in points.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}")
    for name, source in modules.items():
        (site / f"{name}.py").write_text(source)
