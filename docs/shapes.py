"""Keep the asterisks of shapes in docstrings, such as (*in, *out), from being read as Markdown emphasis."""

import re

import griffe

SHAPE = re.compile(r"(`[^`]*`)|(?<=[(, ])\*(?=\w+[,)])")  # group 1 is inline code, which needs no escaping


class Shapes(griffe.Extension):
    """Griffe extension that escapes these asterisks."""

    def on_object(self, *, obj, **others):
        """Escape the docstring of a module, class, function or constant. Griffe calls this method for each of them."""
        if obj.docstring:
            obj.docstring.value = SHAPE.sub(lambda match: match[1] or r"\*", obj.docstring.value)
