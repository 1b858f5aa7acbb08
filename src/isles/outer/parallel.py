"""A call for each of many items, in threads, with the results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_order(call: Callable[[T], R], items: Iterable[T], *, threads: int) -> Iterator[R]:
    """The results of a call that spends its time without the GIL, in the order of the items.

    At most two items for each thread are in work or wait, so memory stays bounded. The first
    exception is raised in the place of its result, and no further item is begun.
    """
    if threads <= 1:
        yield from map(call, items)
        return
    begun = deque[Future[R]]()
    pool = ThreadPoolExecutor(threads, "blocks")
    try:
        for item in items:
            begun.append(pool.submit(call, item))
            if len(begun) >= 2 * threads:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
