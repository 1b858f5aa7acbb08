"""The edge of both programs: errors that the user can mend, without a traceback."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from isles.errors import ConfigErrors, UserError

_PATIENCE_S = 5.0


def told(main: Callable[[], int], *, speaks: bool = True) -> int:
    """Run a program; its exit code, once its errors are told.

    Args:
        main: the program.
        speaks: whether this process tells them. Another one tells the same, and needs a moment: a
            launcher ends all ranks as soon as one has ended.
    """
    try:
        return main()
    except UserError as error:
        if not speaks:
            time.sleep(_PATIENCE_S)
            return int(error.exit_code)
        issues = error.issues if isinstance(error, ConfigErrors) else (error,)
        sys.stderr.write("".join(f"error: {issue}\n" for issue in issues))
        return int(error.exit_code)
