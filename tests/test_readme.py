"""The README says what the records say: its table is the command's output, its picture is there."""

from __future__ import annotations

import re
from pathlib import Path

from workbook import tables

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE = re.compile(r"<!-- results: .*? -->\n(.*?)<!-- end of results -->", re.DOTALL)


def test_the_table_is_generated_from_the_records():
    table = TABLE.search(README)
    assert table, "README.md has no results between its two markers"
    assert table.group(1).strip() == str(tables.summary()), (
        "paste the output of `python -m workbook results --markdown` between the markers"
    )


def test_the_picture_is_that_of_the_records():
    said = re.search(r"!\[([^\]]+)\]\(assets/overview.png\)", README)
    assert said, "README.md shows no assets/overview.png"
    assert said.group(1) == tables.cover().alt, (
        "run `python -m workbook results --picture assets/overview.png` and paste its alt text"
    )


def test_a_number_that_was_typed_is_found():
    table = TABLE.search(README).group(1).strip()
    assert re.sub(r"\d×", "_×", table, count=1) != str(tables.summary())


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)]+)\)", README)
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), f"README.md links to {target}, which is not there"
