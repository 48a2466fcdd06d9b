"""Domains and search spaces, drawn by hypothesis: every kind, nested and conditional."""

from __future__ import annotations

from hypothesis import strategies as st

from prefect_tune.core.search.domains import Float, Integer, Normal, Range, choice, grid_search

QUANTILES = st.integers(0, 2**53 - 1).map(lambda number: number / 2**53) | st.sampled_from([0.0, 0.5, 1 - 2**-53])
SCALES = st.sampled_from(["linear", "log"])
STEPS = st.sampled_from([0.1, 0.25, 1.0, 3.0, 1e-3, 1 / 3])
_NAMES = ["a", "b", "lr", "uniform", "choice", "spaces", "odd key", 'a."b', "?0"]
_RANGES = [
    Float(0, 1),
    Float(1e-4, 1, "log"),
    Float(0, 1, "linear", 0.1),
    Float(1, 4, "log", 0.5),
    Integer(-3, 3),
    Integer(1, 100, "log"),
    Integer(0, 8, "linear", 4),
    Integer(2, 8, "log", 2),
    Normal(0, 1),
    Normal(0, 1, 0.25),
]


@st.composite
def floats(draw: st.DrawFn) -> Float:
    scale = draw(SCALES)
    if draw(st.booleans()):
        q = draw(STEPS)
        first = draw(st.integers(1 if scale == "log" else -1000, 1000))
        return Float(first * q, (first + draw(st.integers(0, 1000))) * q, scale, q)
    low = draw(st.floats(1e-12, 1e12) if scale == "log" else st.floats(-1e308, 1e307))
    return Float(low, draw(st.floats(low, 1e308, exclude_min=True)), scale)


@st.composite
def integers(draw: st.DrawFn) -> Integer:
    scale = draw(SCALES)
    q = draw(st.none() | st.integers(1, 1000))
    step = q or 1
    largest = 2**64 // step
    first = draw(st.integers(1 if scale == "log" else -largest, largest - 1))
    last = draw(st.integers(first + (q is None), min(largest, first + draw(st.sampled_from([3, 1000, 2**64])))))
    return Integer(first * step, last * step, scale, q)


@st.composite
def normals(draw: st.DrawFn) -> Normal:
    q = draw(st.none() | STEPS)
    return Normal(draw(st.floats(-1e6, 1e6)), draw(st.floats(1e-6, 1e6)), q)


def ranges() -> st.SearchStrategy[Range]:
    return floats() | integers() | normals()


_SCALARS = [None, True, False, 0, 1, -3, 0.5, 1.0, 2.5, "", "text"]
_LEAVES = ["constant", "range"]
_BRANCHES = ["choice", "weighted choice", "object", "list"]


@st.composite
def spaces(draw: st.DrawFn, depth: int = 2) -> dict[str, object]:
    names = draw(st.lists(st.sampled_from(_NAMES), max_size=3, unique=True))
    return {name: _node(draw, depth, [*_LEAVES, *_BRANCHES, "grid"]) for name in names}


def _node(draw: st.DrawFn, depth: int, kinds: list[str]) -> object:
    kind = draw(st.sampled_from(kinds if depth else _LEAVES))
    if kind == "constant":
        return draw(st.sampled_from(_SCALARS))
    if kind == "range":
        return draw(st.sampled_from(_RANGES))
    within = _LEAVES + _BRANCHES if "choice" in kind else kinds
    options = [_node(draw, depth - 1, within) for _ in range(draw(st.integers(1, 3)))]
    match kind:
        case "choice":
            return choice(options)
        case "weighted choice":
            return choice(options, [1.0, 0.0, 0.5][: len(options)])
        case "grid":
            return grid_search(options)
        case "object":
            return dict(zip(_NAMES[draw(st.integers(0, 6)) :], options, strict=False))
        case _:
            return options
