"""The program of a process that works on untrusted input under limits of time and memory, for `_limited`.

The parent process starts this file by its path, so that the process imports neither JAX nor this package: it starts in
0.1 s. The parent sends pickled values: first the settings, then one message each. The answer to each is one line of
JSON. If the process exceeds a limit, the operating system ends it, also within compiled code.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import runpy
import signal
import sys
from pathlib import Path

MEMORY_FILE = Path("/proc/self/statm")
"""file of Linux with the size of the address space, in pages; on other systems, only the time is limited"""


def limit_memory(most_bytes: int) -> None:
    """Limit the address space of this process to its present size plus `most_bytes`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if MEMORY_FILE.exists():
        size = int(MEMORY_FILE.read_text().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = size + most_bytes if hard == resource.RLIM_INFINITY else min(size + most_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def main() -> None:
    """Answer messages until the parent closes the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they can reach all processes of a terminal or a service
        signal.signal(number, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it computes
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    messages, answers = sys.stdin.buffer, sys.stdout.buffer
    settings = pickle.load(messages)
    sys.path[:] = settings["path"]
    work = runpy.run_path(settings["program"])["prepare"](settings["values"])
    limit_memory(settings["most_bytes"])
    answer = None
    try:
        while True:
            answers.write(json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
            answers.flush()
            try:
                message = pickle.load(messages)
            except EOFError:
                return
            signal.setitimer(signal.ITIMER_REAL, settings["seconds"])
            answer = work(message)
            signal.setitimer(signal.ITIMER_REAL, 0)
    except MemoryError:
        os._exit(errno.ENOMEM)  # the traceback could need memory, too; the parent knows this status


if __name__ == "__main__":
    main()
