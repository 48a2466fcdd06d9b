"""Charts: the marks in each SVG are counted."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from xml.etree import ElementTree as ET

import pytest

from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal_events import AttemptStarted, FinishKind, TrialFinished, TrialPaused, TrialResumed
from prefect_tune.core.schedulers.base import Pause
from prefect_tune.core.search_view import SearchView
from prefect_tune.reporting.facts import MAX_CURVES, ReportInput
from prefect_tune.reporting.svg import (
    BLUE,
    GREY,
    MAX_SMALL_PANEL_CURVES,
    ORANGE,
    PlotArea,
    draw_learning_curves,
    draw_parallel_coordinates,
    draw_timeline,
    fit_scale,
    make_axes,
)
from tests.fakes.searches.journal_builder import JournalBuilder, all_statuses, asha, pareto, population, single

Chart = Callable[[ReportInput], str | None]
CHARTS: list[Chart] = [draw_learning_curves, draw_parallel_coordinates, draw_timeline]


def count_marks(svg: str | None, kind: str) -> int:
    """The number of elements of a class; for the class dots, the number of dots."""
    assert svg is not None
    elements = [element for element in ET.fromstring(svg).iter() if element.get("class") == kind]
    return sum(str(element.get("d")).count("h0") for element in elements) if kind == "dots" else len(elements)


def texts_of(svg: str | None) -> list[str]:
    assert svg is not None
    return [element.text or "" for element in ET.fromstring(svg).iter() if element.tag.endswith("text")]


def count_lines(svg: str | None, color: str) -> int:
    """The number of lines in groups of this color."""
    assert svg is not None
    groups = [element for element in ET.fromstring(svg).iter() if element.get("stroke") == color]
    return sum(len(group.findall("{http://www.w3.org/2000/svg}path")) for group in groups)


def attempt_statuses(svg: str | None) -> list[tuple[str, str, str]]:
    """The trial, attempt and status of each bar."""
    return re.findall(r"<title>(\w+), attempt (\d), [^<]*: (\w+)</title>", svg or "")


def test_every_trial_has_its_learning_curve_and_one_of_them_is_the_best() -> None:
    svg = draw_learning_curves(asha(12, kills=False).report_input())
    assert count_lines(svg, ORANGE) == 2, "in the panels of its two metrics"
    assert count_marks(svg, "line") > 12
    assert {"loss", "accuracy"} <= set(texts_of(draw_learning_curves(single().report_input()))), "of a training, too"


def test_of_many_trials_no_more_curves_are_drawn_than_can_be_seen() -> None:
    report_input = asha(200).report_input()
    assert len(report_input.snapshot.curves) == MAX_CURVES
    best = report_input.best_trials[0].id
    assert best in report_input.snapshot.curves
    assert best in texts_of(draw_learning_curves(report_input))


def test_a_line_through_the_parameters_for_each_trial() -> None:
    search = asha(30, kills=False)
    svg = draw_parallel_coordinates(search.report_input())
    assert count_lines(svg, ORANGE) == 1
    assert count_lines(svg, BLUE) == len(search.report_input().ranking) - 1
    assert {"lr", "dropout", "model/act", "model/depth", "seed", "loss"} <= set(texts_of(svg))


def test_every_reported_metric_has_a_panel_and_the_small_ones_have_the_best_and_some_others() -> None:
    search = JournalBuilder(settings={"metric": "loss", "mode": "min"})
    for index in range(20):
        search.add_trial(str(index), {"x": index})
        search.start_attempt(str(index))
        for step in (1, 2):
            search.report(str(index), step, {"loss": float(index), "eval": {"f1": index / 20}, "name": "no number"})
    report_input = search.report_input()
    svg = draw_learning_curves(report_input)
    assert {"loss", "eval/f1"} <= set(texts_of(svg))
    assert "name" not in texts_of(svg)
    assert count_lines(svg, ORANGE) == 2, "the best, in both panels"
    assert count_lines(svg, BLUE) == 19 + MAX_SMALL_PANEL_CURVES - 1


def test_of_more_metrics_than_fit_the_first_are_drawn_and_the_others_are_counted() -> None:
    search = JournalBuilder(settings={"metric": "loss", "mode": "min"})
    search.add_trial("0", {"x": 0})
    search.start_attempt("0")
    for step in range(1, 200):
        search.report("0", step, {"loss": 1.0, **{f"m{number:02}": float(step) for number in range(20)}})
    history = search.report_input().snapshot
    assert history.other_metrics == tuple(f"m{number:02}" for number in range(12))
    assert history.metric_count == 21
    assert (len(history.curves["0"]["m00"]), history.curves["0"]["m00"][-1]) <= (24, (199, 199.0))


SPACE = {
    "lr": {"loguniform": [1e-4, 1e-1]},
    "width": {"lograndint": [8, 512]},
    "dropout": {"uniform": [0.001, 1]},
    "scale": {"choice": [0.001, 0.01, 0.1, 1, 10]},
    "model": {"choice": [{"depth": {"lograndint": [1, 100]}}]},
    "made": {"sample_from": "never.imported:function"},
    "batch": 64,
}


def test_an_axis_is_logarithmic_where_the_domain_is_and_nothing_that_a_space_names_is_imported() -> None:
    search = JournalBuilder(settings={"metric": "loss", "mode": "min", "space": SPACE})
    for index in range(5):  # values that say nothing about the domains
        config = {"lr": 0.01 + index / 1000, "dropout": 0.001 * 8**index, "width": 30 + index, "batch": 64}
        search.add_trial(str(index), {**config, "scale": 10.0**index, "model": {"depth": index + 1}, "made": index})
        search.start_attempt(str(index))
        search.report(str(index), 1, {"loss": float(index)})
    report_input = search.report_input()
    assert {name: report_input.has_log_scale(name) for name in report_input.differing_parameters} == {
        "lr": True,
        "width": True,
        "dropout": False,
        "scale": None,
        "model/depth": True,
        "made": None,
    }
    assert report_input.constants == {"batch": 64}
    axes = {axis.name: axis.scale for axis in make_axes(report_input, PlotArea(0, 0, 100, 100))}
    assert {name for name, scale in axes.items() if scale and scale.is_log} == {"lr", "width", "model/depth", "scale"}
    assert all(len(scale.make_ticks(4)) > 1 for scale in axes.values() if scale), "also where there is no decade"


def test_every_attempt_is_on_the_timeline_beneath_the_grey_runs_and_each_that_was_lost_is_crossed_out() -> None:
    svg = draw_timeline(single(60, kills=(23, 41)).report_input())
    assert svg is not None
    colors = [str(element.get("fill")) for element in ET.fromstring(svg).iter() if element.get("class") == "bar"]
    assert (set(colors[:3]), len(colors[3:]), GREY in colors[3:]) == ({GREY}, 3, False)
    assert count_marks(svg, "cross") == 2
    assert [text for text in texts_of(svg) if text.endswith("later")] == ["1 h later", "1 h later"]


RATES = [10.0 ** (-5 + index / 8) for index in range(33)]


@pytest.mark.parametrize(
    ("values", "is_log"),
    [
        ([index / 100 for index in range(1, 51)] + [0.0007], False),  # uniform(0, 0.5) with one small value by chance
        (RATES, True),
        ([0.001, 0.01, 0.1], True),
        ([100.0 * 0.8**index for index in range(40)], True),  # a falling loss
        ([900.0, 950, 970, 990, 1000, 1], False),
        ([1.0, 2, 3, 4], False),
    ],
)
def test_only_what_spans_orders_of_magnitude_evenly_is_drawn_by_them(values: list[float], is_log: bool) -> None:
    assert fit_scale(values, 0, 100).is_log == is_log


def test_a_run_that_died_ends_when_it_was_last_heard_of_and_not_when_it_was_found() -> None:
    history = single(60, kills=(23,)).report_input().snapshot
    attempts, ownerships = history.attempts, history.ownerships
    assert attempts[0].ended_at == ownerships[0].last_entry_at
    assert attempts[0].is_lost
    assert (attempts[1].attempt, attempts[1].from_step) == (2, 20)


def test_a_trial_that_was_not_promoted_is_pruned_and_its_earlier_pauses_stay() -> None:
    search = JournalBuilder()
    for name, attempts in (("kept", 2), ("left", 1)):
        search.add_trial(name, {"x": 1})
        for attempt in range(1, attempts + 1):
            search.start_attempt(name)
            search.report(name, attempt, {"loss": 1.0})
            search.commit(name)
            search.decide(name, Pause(reason="rung"))
            search.record(TrialPaused(trial=name, reason="rung"))
            if attempt < attempts:
                search.record(TrialResumed(trial=name))
        search.record(TrialFinished(trial=name, reason="not promoted", kind=FinishKind.PRUNED))
    expected = [("kept", "1", "paused"), ("kept", "2", "pruned"), ("left", "1", "pruned")]
    assert attempt_statuses(draw_timeline(search.report_input())) == expected


def test_a_bar_begins_with_its_attempt_and_those_of_one_trial_do_not_overlap() -> None:
    search = JournalBuilder()
    search.add_trial("0", {})
    search.start_attempt("0")
    pause, again = TrialPaused(trial="0", reason="its turn is over"), TrialResumed(trial="0")
    for step, events in ((1, [again]), (2, [pause, again])):  # after step 1 it is resumed before it has paused
        search.report("0", step, {"loss": 1.0})
        search.commit("0")
        search.decide("0", Pause(reason="its turn is over"))
        search.record(*events)
    paused_at, sequence = search.now, search.state.trial("0").checkpoints[-1].sequence
    for number, offset in ((2, 2.0), (3, -60.0)):  # the clock of the last machine is a minute behind
        started_at = (search.now + timedelta(seconds=offset)).isoformat()
        started = AttemptStarted(trial="0", attempt=number, from_step=2, from_sequence=sequence, at=started_at)
        search.record(started, after=3.0)
        search.record(pause, again, after=1.0)
    first, second, third = search.report_input().snapshot.attempts
    assert first.ended_at == paused_at
    assert second.began_at == paused_at + timedelta(seconds=2)
    assert third.began_at == second.ended_at


def test_too_many_attempts_to_be_seen_are_drawn_as_how_many_there_were_at_once() -> None:
    svg = draw_timeline(asha(700).report_input())
    assert count_marks(svg, "bar") == 3


@pytest.mark.parametrize("chart", CHARTS)
def test_nothing_is_drawn_of_nothing(chart: Chart) -> None:
    nothing = JournalBuilder()
    nothing.view = SearchView(nothing.state)
    assert chart(nothing.report_input()) is None


@pytest.mark.parametrize("chart", CHARTS)
def test_numbers_that_are_all_alike_or_far_apart_can_be_drawn(chart: Chart) -> None:
    for value in (0.0, -3.0, 1e-300, 1e300, 5):
        search = JournalBuilder()
        for index in range(9):
            search.add_trial(str(index), {"x": index, "y": value, "z": "same" if index else None})
            search.start_attempt(str(index))
            search.report(str(index), 1, {"loss": value})
            search.report(str(index), 2, {"loss": value if index else -1e12})
        if (svg := chart(search.report_input())) is not None:
            ET.fromstring(svg)
            assert not re.search(r"nan|inf", svg.partition(">")[2].replace("font-family", ""))


@pytest.mark.parametrize("chart", CHARTS)
def test_what_a_user_named_is_text_in_a_picture(chart: Chart) -> None:
    search = JournalBuilder(settings={"metric": '<b>&"\x00', "mode": "min"})
    for index in range(12):
        search.add_trial(str(index), {"</text><script>": f"<i>{index % 2}\x1b", "lr": index})
        search.start_attempt(str(index))
        search.report(str(index), 1, {'<b>&"\x00': float(index % 5)})
    if (svg := chart(search.report_input())) is not None:
        assert "<script" not in svg
        ET.fromstring(svg)


PAGES = ("#eaeaeb", "#26272b", "#ffffff", "#0e1116")
"""The backgrounds of Prefect's UI, light and dark, and of the HTML file."""


def _luminance(color: Sequence[float]) -> float:
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(color: str, opacity: float, page: str) -> float:
    """The contrast of a color on a page as WCAG defines it: 1 is invisible, 21 is black on white."""
    front, back = ([int(text[index : index + 2], 16) / 255 for index in (1, 3, 5)] for text in (color, page))
    mixed = [opacity * ink + (1 - opacity) * paper for ink, paper in zip(front, back, strict=True)]
    low, high = sorted((_luminance(mixed), _luminance(back)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("draw", CHARTS)
def test_every_line_and_word_is_visible_on_a_light_and_on_a_dark_page(draw: Chart, page: str) -> None:
    searches = (asha(60), asha(600), pareto(), population(), single())
    charts = [svg for search in searches if (svg := draw(search.report_input())) is not None]
    parts = [part for svg in charts for part in ET.fromstring(svg) if not part.tag.endswith("defs")]
    elements = [element for part in parts for element in part.iter()]
    colored = [(element, kind, str(element.get(kind))) for element in elements for kind in ("stroke", "fill")]
    visible = [(element, kind, color) for element, kind, color in colored if color.startswith("#") and color != "#fff"]
    for element, kind, color in visible:
        if kind == "fill" and element.get("stroke"):
            continue  # its outline makes it visible
        min_contrast = 2.9 if element.tag.endswith("text") else 1.6
        assert _contrast(color, float(element.get(f"{kind}-opacity", 1)), page) >= min_contrast, ET.tostring(element)
    assert visible


def test_an_attempt_is_drawn_by_the_status_that_it_ended_with_and_the_legend_says_how() -> None:
    search = all_statuses()
    svg = draw_timeline(search.report_input())
    assert svg is not None
    titles = re.findall(r"<title>(\w+), attempt 1, steps 0 to 3: (\w+)</title>", svg)
    assert titles == [(name, name) for name in sorted(set(map(str, Status)) - {"pending"})]
    bars = [element for element in ET.fromstring(svg).iter() if element.get("class") == "bar"][1:]
    fills = [(bar.get("fill"), bar.get("fill-opacity")) for bar in bars]
    assert len(set(fills)) == 6
    assert [text for text in texts_of(svg) if text in set(map(str, Status))][-6:] == [
        *("completed", "pruned", "interrupted", "errored", "running", "paused")
    ]
    assert count_marks(svg, "swatch") == 6
