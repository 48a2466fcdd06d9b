"""The values of `resume=`: ours, Ray's, and those that are refused."""

from __future__ import annotations

import pytest

from prefect_tune.core.errors import InvalidInput
from prefect_tune.parameters.search_plan import Resuming, resuming


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (None, Resuming("auto")),
        ("auto", Resuming("auto")),
        (True, Resuming("must")),
        ("must", Resuming("must")),
        ("REMOTE", Resuming("must")),
        ("LOCAL", Resuming("must", local=True)),
        (False, Resuming("never")),
        ("never", Resuming("never")),
        ("AUTO+ERRORED", Resuming("auto", rerun_errored=True)),
        ("must + errored_only", Resuming("must", rerun_errored="only")),
        ("ERRORED", Resuming("must", rerun_errored=True)),
    ],
)
def test_a_word_says_whether_the_experiment_has_to_be_there_and_what_of_it_goes_on(
    given: object, meant: Resuming
) -> None:
    assert resuming(given) == meant


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("PROMPT", "a flow cannot ask"),
        ("AUTO+RESTART_ERRORED", "never starts from nothing again"),
        ("always", "expected True, False, or one of 'auto'"),
        ("", "expected True, False, or one of 'auto'"),
        ("must+never", "says both 'must' and 'never'"),
        (3, "expected 'auto', 'must' or 'never', found 3"),
    ],
)
def test_a_word_that_means_nothing_here_is_refused_with_what_to_say_instead(given: object, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        resuming(given)
