"""Definitions of a script reach its trials by value, or are rejected by name before anything is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = '''
import __main__ as program
import abc, contextvars, enum, functools, itertools, json, logging, math, os, pickle, sys, threading, typing, weakref
import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

T, P, Ts = typing.TypeVar("T"), typing.ParamSpec("P"), typing.TypeVarTuple("Ts")
UserId = typing.NewType("UserId", int)
log, lock, weak = logging.getLogger(__name__), threading.RLock(), weakref.WeakSet()
squared_root = functools.lru_cache(math.sqrt)

@functools.lru_cache(maxsize=None, typed=True)
def fib(n):
    """Recursive."""
    return n if n < 2 else fib(n - 1) + fib(n - 2)
fib.tag = 5

@functools.cache
def even(n): return n == 0 or odd(n - 1)
@functools.cache
def odd(n): return n != 0 and even(n - 1)

def timed(function: typing.Callable[P, T]) -> typing.Callable[P, T]:
    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        wrapper.calls += 1
        return function(*args, **kwargs)
    wrapper.calls = 0
    return wrapper

@timed
@functools.lru_cache
def inner(x): return x
@functools.lru_cache
@timed
def outer(x): return x

class Shape(abc.ABC):
    @property
    @functools.lru_cache
    def area(self): return 2
    @staticmethod
    @functools.lru_cache
    def sides(n): return n
    @functools.cached_property
    def name(self): return "shape"
    @functools.singledispatchmethod
    def add(self, other): return 1
    @add.register
    def _(self, other: int): return 3
    def scaled(self, by, more): return by * more
    doubled = functools.partialmethod(scaled, 2)

@functools.singledispatch
def show(value): return "object"
@show.register
def _(value: int): return "int"
show(1)

class Row(typing.TypedDict, typing.Generic[T], total=False):
    a: typing.Required[int]
    b: "Row"
class Kind(str, enum.Enum):
    A = "a"
class Named(typing.NamedTuple):
    x: int = 3
class Array(typing.Generic[*Ts]): ...
@typing.runtime_checkable
class Sized(typing.Protocol):
    def size(self) -> int: ...
@dataclass(frozen=True)
class Cache:
    lock: typing.Any = field(default_factory=threading.Lock)
    values: dict = field(default_factory=dict)
class Data:  # only an object of it is used, by name
    def size(self): return 4
data, cache = Data(), Cache()
partial = functools.partial(fib, 6)
def make():
    @functools.lru_cache
    def local(n): return n + 1
    return lambda: local(1)
local = make()

def train(config, kind=Kind.A):
    log.info("logged")
    with lock, cache.lock:
        weak.add(data)
    shape, row = Shape(), Row[str](a=1)
    unpickled = pickle.loads(pickle.dumps([data, kind, fib, UserId, Row]))
    return {
        "cached": [fib(20), fib.tag, fib.__doc__, fib.cache_parameters()["typed"], even(10), squared_root(4.0)],
        "wrapped": [inner(1), inner.calls, outer(2), partial(), local()],
        "methods": [shape.area, shape.sides(3), shape.name, shape.add(1), shape.add("x"), shape.doubled(4)],
        "dispatched": [show(1), show("x")],
        "typing": [UserId(3), row["a"], sorted(Row.__required_keys__), Array[int, str]() is not None],
        "classes": [kind is Kind("a"), Named().x, isinstance(data, Sized), len(weak)],
        "by name": [unpickled[0].size(), unpickled[1] is kind, unpickled[2] is fib, unpickled[4] is Row],
    }

variable, executor, steps = contextvars.ContextVar("variable"), ThreadPoolExecutor(1), (n for n in range(3))
file, thread = open(os.devnull, "w"), threading.Thread()
stopped, places, results = threading.Event(), threading.BoundedSemaphore(), queue.PriorityQueue()
relabeled = functools.update_wrapper(functools.lru_cache(lambda x: x), train)
class Missing:
    def __reduce__(self): return "MISSING"
MISSING = Missing()
class Holder:
    def __init__(self): self.parts = {"steps": [1, steps]}
holder = Holder()
def helper(): return holder
def uses_variable(config): variable.get()
def uses_executor(config): executor.submit(int)
def uses_steps(config): next(steps)
def uses_file(config): file.write("x")
def uses_thread(config): thread.start()
def uses_event(config): return stopped.is_set()
def uses_semaphore(config): places.acquire()
def uses_queue(config): results.put(1)
def uses_relabeled(config): relabeled(1)
def uses_missing(config): return MISSING
def uses_holder(config): return helper().parts
def uses_program(config): return program.data
def with_closure():
    counter = (n for n in range(3))
    return lambda config: next(counter)

if __name__ == "__main__":
    from datetime import timedelta
    from prefect_tune.attempt.processes.process_pool import TrialProcessPool
    from prefect_tune.attempt.trial_spec import serialize_for_trial
    from tests.fakes.trial_processes import receive_messages, make_start

    with TrialProcessPool(slots=1, reuse="auto") as pool:
        with pool.open_process(make_start(train, sys.argv[1]), logging.getLogger()) as channel:
            *messages, end = receive_messages(channel)
    rejected = {}
    for function in (uses_variable, uses_executor, uses_steps, uses_file, uses_thread, uses_event, uses_semaphore,
                     uses_queue, uses_relabeled, uses_missing, uses_holder, uses_program, with_closure()):
        try:
            serialize_for_trial(function)
        except Exception as error:
            rejected[function.__name__] = f"{type(error).__name__}: {error}"
    metrics = [dict(message.report.metrics) for message in messages if message.type == "step-done"]
    print(json.dumps([getattr(end, "message", ""), metrics, train({}), rejected]))
'''
REJECTED = {
    "uses_variable": "uses_variable: it uses 'variable' of class ContextVar, which",
    "uses_executor": "uses_executor: it uses '_work_queue' in 'executor' of class SimpleQueue, which",
    "uses_steps": "uses_steps: it uses 'steps' of class generator, which",
    "uses_file": "uses_file: it uses 'file' of class TextIOWrapper, which",
    "uses_thread": "uses_thread: it uses 'thread' of class Thread, which",
    "uses_event": "uses_event: it uses 'stopped' of class Event, which",
    "uses_semaphore": "uses_semaphore: it uses 'places' of class BoundedSemaphore, which",
    "uses_queue": "uses_queue: it uses 'results' of class PriorityQueue, which",
    "uses_relabeled": "uses_relabeled: it uses 'relabeled' of class _lru_cache_wrapper, which",
    "uses_missing": "uses_missing: it uses 'MISSING' of class Missing, which",
    "uses_holder": "uses_holder: it uses '[1]' in 'steps' in 'parts' in 'holder' in 'helper' of class generator, which",
    "uses_program": "uses_program: it uses 'program' of class module, which",
    "<lambda>": "with_closure.<locals>.<lambda>: it uses 'counter' of class generator, which",
}


def test_what_a_script_defines_reaches_its_trials_and_what_cannot_is_rejected_by_its_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path)]
    environment = {"PYTHONPATH": f"{Path(__file__).parents[3]}:{tmp_path}", "PATH": "/usr/bin:/bin"}
    process = subprocess.run(command, env=environment, input="", capture_output=True, text=True, check=True)
    failure, metrics, here, rejected = json.loads(process.stdout.splitlines()[-1])
    assert failure == ""
    assert metrics == [here]
    assert rejected.keys() == REJECTED.keys()
    for name, message in rejected.items():
        assert message.startswith(f"InvalidInput: {REJECTED[name]} cannot be sent to the trial's process ("), message
