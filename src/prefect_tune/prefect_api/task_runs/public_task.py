"""The type of the public tasks: Prefect's own types of `submit` are partly unknown to pyright, and lack `wait_for`.

To ask upstream: `submit(*args: P.args, wait_for=..., **kwargs: P.kwargs)` is no valid signature, so that pyright takes
its arguments as unknown, and mypy asks for `return_state` too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, overload

from prefect import Task, task
from prefect.futures import PrefectFuture, PrefectFutureList

_P = ParamSpec("_P")
_R = TypeVar("_R")

if TYPE_CHECKING:

    class PublicTask(Task[_P, _R]):
        """A Prefect task whose calls are checked; at run time it is a plain one.

        `return_state=True` is left out of the types: the calls take it as any task of Prefect.
        """

        def __call__(self, *args: _P.args, **options: _P.kwargs) -> _R:  # type: ignore[override]  # see above
            ...

        @overload  # type: ignore[override]  # see above
        def submit(self, *args: _P.args, **options: _P.kwargs) -> PrefectFuture[_R]: ...
        @overload
        def submit(self, *args: Any, wait_for: Iterable[PrefectFuture[Any]], **options: Any) -> PrefectFuture[_R]: ...
        def submit(self, *args: Any, **options: Any) -> PrefectFuture[_R]: ...

        def map(self, *args: Any, **options: Any) -> PrefectFutureList[_R]:  # type: ignore[override]  # see above
            ...


def public_task(**options: Any) -> Callable[[Callable[_P, _R]], PublicTask[_P, _R]]:
    """Return a decorator that makes a Prefect task, with the options of `prefect.task`."""
    return cast("Callable[[Callable[_P, _R]], PublicTask[_P, _R]]", task(**options))
