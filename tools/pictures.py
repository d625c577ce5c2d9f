# SPDX-License-Identifier: Apache-2.0
"""``make pictures``: draws docs/NAME.svg from docs/pictures/NAME.dot with Graphviz, for light and dark pages.

.venv/bin/python tools/pictures.py [NAME …]
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
SOURCES = DOCS / "pictures"
#: Colours of the sources, and the colour that replaces each on a dark page, as on GitHub.
DARK = {
    "#ffffff": "#0d1117",
    "#f6f8fa": "#151b23",
    "#1f2328": "#f0f6fc",
    "#59636e": "#9198a1",
    "#8c959f": "#656c76",
    "#dafbe1": "#12261e",
    "#1a7f37": "#3fb950",
    "#fff1e5": "#2b1d10",
    "#bc4c00": "#f0883e",
    "#ddf4ff": "#0f2438",
    "#0969da": "#4493f8",
}


def stamp(source: Path) -> str:
    """The comment in a picture that identifies the text from which it was drawn."""
    return f"<!-- make pictures: docs/pictures/{source.name} {hashlib.sha256(source.read_bytes()).hexdigest()[:16]} -->"


def style() -> str:
    """CSS rules for a dark page: they override the colours that Graphviz writes as attributes."""
    rules = "".join(
        f'[fill="{light}"]{{fill:{dark}}}[stroke="{light}"]{{stroke:{dark}}}' for light, dark in DARK.items()
    )
    return f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"


def picture(source: Path) -> str:
    """The SVG of a source."""
    made = subprocess.run(["dot", "-Tsvg", source], check=True, capture_output=True, text=True).stdout
    made = made[made.index("<svg") :]
    # Remove comments, which contain the version of Graphviz, and titles, which are tooltips with names of the source.
    made = re.sub(r"<!--.*?-->\n?|<title>.*?</title>\n?", "", made, flags=re.DOTALL)
    title = re.search(r'^digraph "(.*)"', source.read_text(), re.MULTILINE)
    assert title is not None
    head = f'{stamp(source)}\n<title id="title">{escape(title[1])}</title>\n{style()}\n'
    return made.replace("<svg ", '<svg role="img" aria-labelledby="title" ', 1).replace(">\n", f">\n{head}", 1)


def main(names: list[str]) -> int:
    """Write all pictures, or those named."""
    for source in sorted(SOURCES.glob("*.dot")):
        if not names or source.stem in names:
            (DOCS / f"{source.stem}.svg").write_text(picture(source))
            print(f"docs/{source.stem}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
