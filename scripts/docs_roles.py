"""Shows docstrings' roles (``:class:`X```, ``:meth:`Y```) as code and policies' options as plain defaults."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|attr|data|mod):`~?([^`]*)`")

_SECTION = re.compile(r"(\n)([ ]*(?:Args|Attributes|Returns|Yields|Raises):\n)")
"""griffe reads a section only behind an empty line."""


def without_roles(text: str) -> str:
    """The text, names in roles as plain code: the last part of a name that begins with a tilde."""
    return _ROLE.sub(lambda role: f"`{role[1].rsplit('.', 1)[-1] if ':`~' in role[0] else role[1]}`", text)


class Roles(griffe.Extension):
    """Rewrites every docstring and every option of a policy before mkdocstrings reads them."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        value = attr.value
        if isinstance(value, griffe.ExprCall) and value.canonical_path.endswith(".option"):
            attr.value = value.arguments[0]

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = without_roles(obj.docstring.value)
            obj.docstring.value = _SECTION.sub(r"\1\n\2", text)
