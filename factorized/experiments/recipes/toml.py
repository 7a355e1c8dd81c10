"""Writing a recipe as TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def to_toml(table: Mapping[str, Any]) -> str:
    """Return ``table`` as TOML, its tables last; what is None has no place in TOML and is left out."""
    fields = [f"{key} = {_value(value)}" for key, value in table.items() if not _is_table(value) and value is not None]
    parts = ["\n".join(fields)] if fields else []
    parts += [f"[{key}]\n{to_toml(value)}" for key, value in table.items() if _is_table(value)]
    return "\n\n".join(parts)


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)  # words, whole numbers, true and false are the same there
