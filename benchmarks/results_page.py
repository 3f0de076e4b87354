"""Make the tables and pictures of README and of the documents from the recorded runs.

    python -m benchmarks.results_page           # write them
    python -m benchmarks.results_page --check   # fail if the documents' tables are not those of the records

The text is written by hand. This module writes the parts between `<!-- NAME -->` and `<!-- end -->`: a table, and the
runs that it comes from. If a run has not been recorded, the page says which. A part `<!-- recorded once NAME -->` stays
as it is: the program that made it is in the history, at the commit of its record. Pictures need matplotlib.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from benchmarks import gpu_tables, result_tables
from benchmarks.command import call
from benchmarks.overview_tables import OVERVIEWS, SUMMARIES
from benchmarks.record import ROOT, Run, instructions, of_any_cpu, recorded
from benchmarks.result_pictures import draw
from benchmarks.result_tables import kv_sizes

TABLES = result_tables.TABLES | gpu_tables.TABLES
PARTS = result_tables.PARTS | gpu_tables.PARTS
PAGE = ROOT / "docs" / "results.md"
PAGES = (ROOT / "README.md", PAGE, ROOT / "docs" / "faults.md")
PICTURES = PAGE.with_suffix("")
MARKED = re.compile(r"<!-- (?P<name>[\w .-]+?) -->\n(?P<body>(?:(?!<!-- ).)*?)<!-- end -->\n", re.DOTALL)


ONCE = "recorded once "
"""What precedes the name of the record, in the mark of a part whose program is in the history."""


def source(runs: Sequence[Run]) -> str:
    """The line that names the runs of a table: command, commit, product, machine."""
    lines = []
    for run in runs:
        machine = run["machine"]
        where = f"{machine['cpu']}, {machine['cores']} cores, {instructions(machine)}"
        if gpu := run.get("workload", {}).get("gpu"):
            where = f"{gpu}, {where}"
        lines.append(f"`{run['command']}`, commit {run['commit'][:7]}, product {run['product'][:8]}, {where}")
    return "\n" + "\\\n".join(lines) + "\n"


CAPTIONS = {
    "versus-15m-bfloat16-fixed": "Output tokens per second over the requests at a time",
    "versus-0.5b-bfloat16-fixed": "Output tokens per second over the requests at a time",
    "goodput-15m-float32-fixed": "Share of requests that met both targets over the rate of arrivals",
    "goodput-15m-float32-sharegpt-avx2": "Share of requests that met both targets over the rate of arrivals",
    "speculation-15m-float32": "Output tokens per second with prompt lookup against none, over the requests at once",
    "speculation-15m-float32-fixed": "Share of drafted tokens that were right, over the requests at once",
    "profiles-15m-float32": "Goodput of two profiles against that of a packed pool that drafts, too, over the rate",
    "steady": "Memory of each process over the requests",
    "autoscale": "Workers wanted over time",
}
"""Captions of the parts that have a picture; a part is named like its record."""


def told(name: str) -> str:
    """A record by its name, and by the model, the type and the workload that the name has."""
    of = re.search(r"(15m|0\.5b)-.*", of_any_cpu(name))
    return f"`{name}` ({of[0].replace('-', ', ')})" if of else f"`{name}`"


def part(name: str) -> str:
    """The text between the marks of that name."""
    if name == "kv sizes":
        return f"\n{kv_sizes()}\n`baton kv-size`\n\n"
    if name in SUMMARIES:
        records, render = SUMMARIES[name]
        return f"\n{render(*map(recorded, records))}\n"
    if name in OVERVIEWS:
        records, render = OVERVIEWS[name]
    else:
        record, render = PARTS.get(name) or (name, TABLES[of_any_cpu(name)])
        records = (record,)
    found = {record: recorded(record) for record in records}
    if missing := [told(record) for record, run in found.items() if run is None]:
        return f"\nNot measured yet: {', '.join(missing)}.\n\n"
    runs = [run for run in found.values() if run is not None]
    picture = f"\n![{CAPTIONS[name]}](results/{records[0]}.svg)\n" if name in CAPTIONS else ""
    return f"\n{render(*runs)}{source(runs)}{picture}\n"


def rendered(page: str) -> str:
    """The page with its parts made from the recorded runs."""

    def replace(found: re.Match[str]) -> str:
        if found["name"].startswith(ONCE):
            return found[0]
        return f"<!-- {found['name']} -->\n{part(found['name'])}<!-- end -->\n"

    return MARKED.sub(replace, page)


def main(*, check: Annotated[bool, "write nothing"] = False) -> None:
    """Write the pages, or compare them."""
    pages = {page: page.read_text() for page in PAGES}
    if check:
        stale = [page.name for page, text in pages.items() if rendered(text) != text]
        raise SystemExit(f"not what is recorded: {', '.join(stale)}" if stale else 0)
    for page, text in pages.items():
        page.write_text(rendered(text))
    for path in draw(PICTURES):
        print(path)


if __name__ == "__main__":
    call(main, __doc__)
