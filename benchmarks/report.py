"""What every suite shares: where the figures come from, the files that they go to, and the canvas of a plot."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from memory import Ask

from qkv.info import info


class Suite(Protocol):
    """A table that grows row by row, and what is made of it at the end."""

    @property
    def sizes(self) -> dict[str, str | int]:
        """What the names of the rows leave out."""

    def head(self) -> str:
        """The header of the table."""

    def measure(self, ask: Ask) -> Iterator[Any]:
        """The rows, each as it is done; raises Refused for a wrong result."""

    def line(self, row: Any) -> str:
        """One row of the table."""

    def summary(self, rows: Sequence[Any]) -> str:
        """What stands below the table."""

    def record(self, rows: Sequence[Any]) -> dict[str, Any]:
        """Every figure, for JSON."""

    def plot(self, rows: Sequence[Any], path: Path) -> bool:
        """Whether a picture was drawn."""


def machine() -> dict[str, str | int]:
    """What the figures were measured on."""
    about = info()
    return {
        "processor": about.machine.processor,
        "capability": about.machine.torch_capability,
        "system": about.machine.system,
        "threads": about.machine.threads,
        **about.versions,
        "commit": commit(),
    }


def commit() -> str:
    """The commit that was measured, and whether the files differ from it."""
    here, git = Path(__file__).parent, ("git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*")
    try:
        return subprocess.run(git, cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(folder: Path, name: str, suite: Suite, rows: Sequence[Any], summary: str, command: str) -> list[Path]:
    """The rows as JSON, the tables as Markdown, and a plot where matplotlib is installed; the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"command": command, "sizes": suite.sizes, "machine": machine()}
    (folder / f"{name}.json").write_text(json.dumps({**about, **suite.record(rows)}, indent=1) + "\n", encoding="utf-8")
    plotted = suite.plot(rows, folder / f"{name}.png")
    table = "\n".join([suite.head(), *map(suite.line, rows), "", summary])
    text = f"# Benchmark: {name}\n\n`{command}`\n\n{told()}\n\n```text\n{table}\n```\n"
    text += f"\n![the same figures as a picture]({name}.png)\n" if plotted else ""
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    return [folder / f"{name}{kind}" for kind in (".json", ".md", *([".png"] if plotted else []))]


def told() -> str:
    """The machine in one line."""
    return "; ".join(f"{key} {value}" for key, value in machine().items())


def canvas(width: float, height: float) -> Any:
    """An empty figure that needs no display; None without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def logarithmic(axis: Any, lengths: Sequence[int], title: str) -> None:
    """Logarithmic axes with the lengths as the only ticks across."""
    axis.set_title(title, fontsize=11)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
