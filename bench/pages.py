"""What the pages under docs/ are made of by scripts: tables, pictures, figures between marks."""

from collections.abc import Sequence

END = "<!-- end of figures -->"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def placed(page: str, script: str, title: str, figures: str) -> str:
    """The page with the figures that `script` makes between their marks; they come last, under
    `title`, where it has none yet."""
    mark = f"<!-- figures: made by {script} -->"
    if mark not in page:
        page = f"{page.rstrip()}\n\n## {title}\n\n{mark}\n{END}\n"
    before, rest = page.split(mark)
    return f"{before}{mark}\n\n{figures}\n{END}{rest.split(END, 1)[1]}"


def drawing(wide: float, high: float, parts: Sequence[str]) -> str:
    """An SVG picture on white."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" '
        f'font-family="sans-serif" font-size="11"><rect width="{wide:.0f}" height="{high:.0f}" '
        f'fill="white"/>{"".join(parts)}</svg>\n'
    )
