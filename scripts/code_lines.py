"""Counts lines of code: without blanks, comments and docstrings. `python scripts/code_lines.py [FOLDER ...]`

A docstring is any string that stands alone, so the ones below fields too.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(source: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in LAYOUT for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> None:
    for name in sys.argv[1:] or ["rollart", "tests"]:
        counts: dict[str, int] = {}
        for path in sorted((ROOT / name).rglob("*.py")):
            part = path.relative_to(ROOT / name).parts
            folder = part[0] if len(part) > 1 else "."
            counts[folder] = counts.get(folder, 0) + code_lines(path.read_text())
        print(f"{name}: {sum(counts.values())}")
        for folder, count in counts.items():
            print(f"  {count:6} {folder}")


if __name__ == "__main__":
    main()
