from __future__ import annotations

import ast
from pathlib import Path

import dthpc.config.schema as schema


def test_every_field_is_described() -> None:
    tree = ast.parse(Path(schema.__file__).read_text())
    missing = []
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        for position, statement in enumerate(node.body):
            if not isinstance(statement, ast.AnnAssign):
                continue
            following = node.body[position + 1] if position + 1 < len(node.body) else None
            described = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if not described:
                missing.append(f"{node.name}.{ast.unparse(statement.target)}")
    assert missing == []
