"""The program that renders chat templates in a process with limits (`config/_limited.py`), for `_template`.

A template comes with downloaded weights, so it is untrusted code. Jinja's sandbox forbids attributes that lead to the
interpreter. It does not bound the work: nested loops, strings that double in every iteration, or a width of a billion.
The limits of the process do.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.sandbox

LONGEST = 2**24
"""maximum number of characters of a rendered text"""


class _Refused(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of transformers for chat templates, and the state of a rendering."""

    def __init__(self):
        extensions, loader = [_Generation, jinja2.ext.loopcontrols], jinja2.FunctionLoader(_no_file)
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, loader=loader)
        self.filters["tojson"] = _tojson
        self.globals |= {"raise_exception": _raise_exception, "namespace": _Namespace}
        self.globals["strftime_now"] = lambda layout: self.now.strftime(layout)
        del self.globals["lipsum"]  # random text
        self.now = datetime.now()
        self.length = 0
        """characters rendered so far"""
        self.generated: list[tuple[int, int]] = []
        """(start, end) of the text inside `{% generation %}`"""

    def render(self, template: jinja2.Template, values: Mapping[str, Any], now: datetime) -> dict[str, Any]:
        self.now, self.length, self.generated = now, 0, []
        blocks = []
        for block in template.generate(**values):
            blocks.append(block)
            self.length += len(block)
            if self.length > LONGEST:
                return _error("stopped", f"was stopped, because its text is longer than {LONGEST:,} characters")
        return {"text": "".join(blocks), "generated": self.generated}


def prepare(_: None) -> Callable[[tuple[str, Sequence[Mapping[str, Any]], datetime]], list[dict[str, Any]]]:
    """Return a function that renders a template: (source, the variables of each rendering, time) to the answers.

    An answer has a text and the places of generated parts, or an error of the kind "refused", "stopped" or "failed".
    Of a template that does not parse, the only answer is an error.
    """
    environment = _Environment()
    parsed = functools.lru_cache(maxsize=16)(environment.from_string)
    parsed("{{ 1 }}")  # what every template needs does not count

    def render(message: tuple[str, Sequence[Mapping[str, Any]], datetime]) -> list[dict[str, Any]]:
        source, several, now = message
        try:
            template = parsed(source)
        except (RecursionError, MemoryError):
            why = "its blocks or expressions are nested too deeply, or its constants need too much memory"
            return [_error("failed", f"does not parse: {why}")]
        except Exception as error:  # also errors of Python's compiler, and of constants that Jinja computes
            where = _in_line(getattr(error, "lineno", None))
            return [_error("failed", f"does not parse{where}: {_line(error) or type(error).__name__}")]
        return [_rendered(environment, template, values, now) for values in several]

    return render


def _rendered(
    environment: _Environment, template: jinja2.Template, values: Mapping[str, Any], now: datetime
) -> dict[str, Any]:
    try:
        return environment.render(template, values, now)
    except _Refused as error:
        return _error("refused", f"refuses the messages: {_line(error)}")
    except RecursionError:
        return _error("stopped", "was stopped, because its calls are nested too deeply")
    except MemoryError:  # ends the process
        raise
    except Exception as error:  # templates call methods of any value, which can raise anything
        return _error("failed", f"fails{_in_line(_line_number(error))}: {type(error).__name__}, {_line(error)}")


def _error(kind: Literal["refused", "stopped", "failed"], text: str) -> dict[str, Any]:
    return {"kind": kind, "error": text}


def _in_line(number: int | None) -> str:
    return "" if number is None else f" in line {number}"


def _no_file(name: str) -> NoReturn:
    """Refuse the tags include, import and extends: a template can't read files."""
    raise jinja2.TemplateRuntimeError(f"a chat template can't read other templates, got {name!r:.80}")


def _line(error: BaseException) -> str:
    """Return the message of an error as one short line."""
    return " ".join(str(error).split())[:300].rstrip(".")


def _line_number(error: BaseException) -> int | None:
    """Return the line of a template at which an error occurred, if it is known."""
    if (line := getattr(error, "lineno", None)) is not None:
        return line
    found, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            found = trace.tb_lineno
        trace = trace.tb_next
    return found


# Functions and tags that transformers adds to Jinja.


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes the characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


class _Namespace(jinja2.utils.Namespace):
    """`namespace` in a template, without attributes that begin with an underscore: Python would call some of them."""

    def __init__(*args: object, **kwargs: object):
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _Namespace._check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        _Namespace._check_name(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.sandbox.SecurityError(f"a namespace can't have the attribute {name!r}")


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %} ... {% endgeneration %}`: the text inside is what the assistant wrote."""

    tags = frozenset(["generation"])

    def parse(self, parser: jinja2.parser.Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_record"), [], [], body).set_lineno(line)

    def _record(self, caller: Callable[[], str]) -> str:
        text, start = caller(), self.environment.length
        self.environment.generated.append((start, start + len(text)))
        return text
