"""Small mistakes that can be made in a Python file: one changed line each, always listed in the same order.

Pure: from a source text to its mutations. `code_repair.py` plays them, `scripts/repair_catalogue.py` finds those that a
package's own tests notice.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple

COMPARED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in", "is": "is not"}
COMPARED |= {"not in": "in", "is not": "is"}
COMPUTED = {"+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "%": "//", "**": "*", "&": "|", "|": "&"}
JOINED = {"and": "or", "or": "and"}
_OPERATORS: dict[type[ast.AST], str] = {
    **{ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.In: "in"},
    **{ast.Is: "is", ast.NotIn: "not in", ast.IsNot: "is not", ast.Add: "+", ast.Sub: "-", ast.Mult: "*"},
    **{ast.FloorDiv: "//", ast.Div: "/", ast.Mod: "%", ast.Pow: "**", ast.BitAnd: "&", ast.BitOr: "|"},
    **{ast.And: "and", ast.Or: "or"},
}


class Mutation(NamedTuple):
    """One line that becomes another one."""

    line: int
    """Counted from 1."""
    old: str
    new: str
    function: str
    """In which it is; methods as `Class.method`."""
    kind: str


def mutations(source: str) -> list[Mutation]:
    """All of them, in the order of the source. Some may no longer be Python."""
    lines = source.splitlines()
    found: list[Mutation] = []
    for function, node in _in_functions(ast.parse(source)):
        for kind, line, start, end, text in _changes(node, lines):
            raw = lines[line - 1].encode()
            new = (raw[:start] + text.encode() + raw[end:]).decode()
            if new != lines[line - 1]:
                found.append(Mutation(line, lines[line - 1], new, function, kind))
    return sorted(dict.fromkeys(found))


def _in_functions(tree: ast.AST, names: tuple[str, ...] = (), inside: bool = False) -> Iterator[tuple[str, ast.AST]]:
    """Every node of a function's body; not decorators, defaults, annotations, texts."""
    for child in ast.iter_child_nodes(tree):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for statement in child.body:
                    yield ".".join([*names, child.name]), statement
                    yield from _in_functions(statement, (*names, child.name), inside=True)
            case ast.ClassDef():
                yield from _in_functions(child, (*names, child.name), inside)
            case ast.JoinedStr():
                continue
            case _:
                if inside:
                    yield ".".join(names), child
                yield from _in_functions(child, names, inside)


Change = tuple[str, int, int, int, str]
"""Kind, line, the bytes of it from and to, and what stands there instead."""


def _changes(node: ast.AST, lines: list[str]) -> Iterator[Change]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield from _operator(left, op, right, COMPARED, lines, "comparison")
        case ast.BinOp(left=left, op=op, right=right):
            yield from _operator(left, op, right, COMPUTED, lines, "arithmetic")
        case ast.BoolOp(op=op, values=[left, right, *_]):
            yield from _operator(left, op, right, JOINED, lines, "logic")
        case ast.UnaryOp(op=ast.Not(), operand=inner) if inner.lineno == node.lineno:
            yield "negation", node.lineno, node.col_offset, inner.col_offset, ""
        case ast.Constant(value=bool(value)):
            yield "constant", *_span(node), str(not value)
        case ast.Constant(value=int(value)) if abs(value) < 1000:
            yield "constant", *_span(node), str(value + 1)
        case ast.If(test=test) | ast.While(test=test) if test.lineno == test.end_lineno:
            text = _text(test, lines)
            yield "condition", *_span(test), f"not ({text})"
        case ast.Return(value=ast.expr() as value) if value.lineno == value.end_lineno == node.lineno:
            yield "return", *_span(value), "None"
        case ast.Break():
            yield "loop", *_span(node), "continue"
        case ast.Continue():
            yield "loop", *_span(node), "break"
        case ast.Call(args=[first, second, *_]) if first.lineno == second.end_lineno:
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                between = lines[first.lineno - 1].encode()[first.end_col_offset : second.col_offset].decode()
                text = f"{_text(second, lines)}{between}{_text(first, lines)}"
                assert second.end_col_offset is not None
                yield "arguments", first.lineno, first.col_offset, second.end_col_offset, text
        case ast.AugAssign(op=ast.Add() | ast.Sub(), target=target, value=value) if value.lineno == target.lineno:
            was, now = ("+=", "-=") if isinstance(node.op, ast.Add) else ("-=", "+=")
            yield from _between(target, value, was, now, lines, "arithmetic")


def _operator(
    left: ast.expr, op: ast.AST, right: ast.expr, table: dict[str, str], lines: list[str], kind: str
) -> Iterator[Change]:
    word = _OPERATORS.get(type(op), "")
    if word in table:
        yield from _between(left, right, word, table[word], lines, kind)


def _between(left: ast.AST, right: ast.AST, was: str, now: str, lines: list[str], kind: str) -> Iterator[Change]:
    """Where an operator stands on the line of both its sides."""
    line, start, end = getattr(left, "end_lineno"), getattr(left, "end_col_offset"), getattr(right, "col_offset")  # noqa: B009
    if line != getattr(right, "lineno"):  # noqa: B009
        return
    gap = lines[line - 1].encode()[start:end].decode()
    if gap.count(was) == 1:
        yield kind, line, start, end, gap.replace(was, now)


def _span(node: ast.expr | ast.stmt) -> tuple[int, int, int]:
    assert node.end_col_offset is not None
    return node.lineno, node.col_offset, node.end_col_offset


def _text(node: ast.expr, lines: list[str]) -> str:
    return lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode()
