"""Runs the Python of a page from its first line, as a reader pastes it, and prints what it prints.

python docs/run_page.py docs/tutorials/multilevel.md
"""

from pathlib import Path
import re
import sys
import textwrap

BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", re.M | re.S)


def code_of(page: Path) -> str:
    """The blocks in the lines in which they are on the page; doctests run on their own."""
    text, lines = page.read_text(), [""] * len(page.read_text().splitlines())
    for block in BLOCK.finditer(text):
        if ">>>" not in block[2]:
            code = textwrap.dedent(block[2]).splitlines()
            start = text.count("\n", 0, block.start(2))
            lines[start : start + len(code)] = code
    return "\n".join(lines)


if __name__ == "__main__":
    exec(compile(code_of(Path(sys.argv[1])), sys.argv[1], "exec"), {"__name__": "__main__"})
