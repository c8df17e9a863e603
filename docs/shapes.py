"""In docstrings the asterisks of shapes, (*in, *out), are meant as they stand; Markdown would set in italics."""

import re

import griffe

SHAPE = re.compile(r"(`[^`]*`)|(?<=[(, ])\*(?=\w+[,)])")  # code is left alone


class Shapes(griffe.Extension):
    """Escapes them as docstrings are read."""

    def on_object(self, *, obj, **others):
        """Called by Griffe for every module, class, function and constant."""
        if obj.docstring:
            obj.docstring.value = SHAPE.sub(lambda match: match[1] or r"\*", obj.docstring.value)
