"""Runs a user's own script as Python itself would; a signal makes it write its stacks.

    python -u main.py FD SCRIPT ARGUMENTS…

On a signal that programs rarely use, Python writes the stacks of all its threads to the file that
is open as FD, even while C code holds the GIL. The script runs as `__main__`, with its own
arguments, folder and an empty namespace. isles never imports this file, and the file imports
nothing of isles: the script's folder must be first on the path, as without isles.
"""

import builtins
import faulthandler
import os
import signal
import sys
from importlib.machinery import SourceFileLoader
from types import TracebackType


def _run(fd: int, script: str, arguments: list[str]) -> None:
    """Become the script. Nothing of this module is usable after its namespace is the script's."""
    own, path = __file__, os.path.abspath(script)  # noqa: PTH100  # as Python itself sets it
    number = getattr(signal, "SIGRTMAX", None)
    if number is not None:
        faulthandler.register(number - 5, file=fd, all_threads=True, chain=False)
    sys.argv[:] = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))  # noqa: PTH120
    show = sys.__excepthook__

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # The frames of this file are not the script's.
        while trace is not None and trace.tb_frame.f_code.co_filename == own:
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook
    with open(path, "rb") as stream:  # noqa: PTH123
        source = stream.read()
    namespace = sys.modules["__main__"].__dict__
    fresh = {
        "__name__": "__main__",
        "__file__": path,
        "__builtins__": builtins,
        "__doc__": None,
        "__package__": None,
        "__spec__": None,
        "__cached__": None,
        "__loader__": SourceFileLoader("__main__", path),
    }
    namespace.clear()
    namespace.update(fresh)
    exec(compile(source, path, "exec", dont_inherit=True), namespace)


if __name__ == "__main__":
    _run(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
