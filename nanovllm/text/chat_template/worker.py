"""The process that renders chat templates, with bounds on time, memory and output. See `process.py`.

Runs as a script: `python -I -S worker.py DIRECTORY...`, where the directories hold Jinja2 and MarkupSafe. It
imports nothing else outside of the standard library. A request is a length of 8 bytes and that many bytes of JSON. An
answer is a length, a status byte, and UTF-8 text.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO

RENDERED, FAILED, TOO_LONG, OUT_OF_MEMORY = b"rftm"
LENGTH_BYTES = 8


def main() -> None:
    """Answer requests until standard input ends."""
    sys.path[:0] = sys.argv[1:]
    _restrict()
    renderer = Renderer()
    while length := sys.stdin.buffer.read(LENGTH_BYTES):
        request = json.loads(sys.stdin.buffer.read(int.from_bytes(length, "little")))
        _bound(request["cpu_seconds"], request["memory_bytes"])
        status, text = renderer.answer(request["template"], request["variables"], request["max_chars"])
        _send(sys.stdout.buffer, status, text)


class Renderer:
    """Transformers' Jinja environment: sandboxed, immutable, with its filters, functions and extensions."""

    def __init__(self) -> None:
        import jinja2.ext
        import jinja2.sandbox
        import jinja2.utils
        from jinja2.exceptions import TemplateError

        class Generation(jinja2.ext.Extension):
            """{% generation %} marks answers for training; here its content is rendered as it is."""

            tags = {"generation"}  # noqa: RUF012 - as Jinja has it

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        self._environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        self._environment.filters["tojson"] = _tojson
        self._environment.globals["raise_exception"] = raise_exception
        self._environment.globals["dict"] = _Dict()
        self._environment.globals["namespace"] = _namespace_class(jinja2.utils.Namespace)
        self._environment.globals["strftime_now"] = _strftime_now
        self._compiled: tuple[str, Any] = ("", None)  # the last template, which is usually used again

    def answer(self, template: str, variables: Mapping[str, Any], max_chars: int) -> tuple[int, str]:
        """The status, and the text or the error message."""
        try:
            if self._compiled[0] != template or self._compiled[1] is None:
                self._compiled = (template, self._environment.from_string(template))
            parts, size = [], 0
            for part in self._compiled[1].generate(**variables):
                parts.append(part)
                size += len(part)
                if size > max_chars:
                    return TOO_LONG, ""
            return RENDERED, "".join(parts)
        except MemoryError:
            return OUT_OF_MEMORY, ""
        except Exception as error:  # a template may raise any type
            return FAILED, str(error)[:1000] or type(error).__name__


class _Dict:
    """`dict` without the attributes of a type."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _namespace_class(base: Any) -> Any:
    """Jinja's namespace without names that begin with an underscore, which lead to Python's internals."""

    class Namespace(base):
        def __init__(*args: Any, **named: Any) -> None:
            self, rest = args[0], args[1:]
            attributes = dict(*rest, **named)
            for name in attributes:
                _refuse_underscore(name)
            base.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_underscore(name)
            base.__setitem__(self, name, value)

    return Namespace


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise ValueError(f"a namespace cannot have an attribute {name!r}: rename it")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(text: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(text)


def _restrict() -> None:
    """Forbid writing files and limit open ones. If memory runs out, the kernel ends this process first."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 16)):
        _lower(limit, value)


def _bound(cpu_seconds: float, memory_bytes: int) -> None:
    """Bound the next request. The kernel ends the process if it exceeds the time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, math.ceil(usage.ru_utime + usage.ru_stime + cpu_seconds))
    _lower(resource.RLIMIT_AS, memory_bytes)


def _lower(limit: int, value: int) -> None:
    """Set a soft limit, as far as the hard one allows."""
    _, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _send(stream: BinaryIO, status: int, text: str) -> None:
    try:
        body = text.encode("utf-8", "surrogatepass")
    except MemoryError:
        status, body = OUT_OF_MEMORY, b""
    stream.write((len(body) + 1).to_bytes(LENGTH_BYTES, "little") + bytes([status]))
    stream.write(body)
    stream.flush()


if __name__ == "__main__":
    main()
