"""When requests go out, what prompts there are, and what is made of the outcomes."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest

from deployments.bench.client import Failure, Outcome, base_of
from deployments.bench.load import Schedule
from deployments.bench.prompts import DatasetError, dataset, generated
from deployments.bench.report import Spread, percentile, plot, summary, words


def test_arrivals_come_at_the_rate_and_are_the_same_for_a_seed():
    due = list(Schedule(rate=50.0, duration_s=100.0, seed=1).due())
    assert (
        due
        == list(Schedule(rate=50.0, duration_s=100.0, seed=1).due())
        != list(Schedule(rate=50.0, duration_s=100.0).due())
    )
    assert due[0] == 0.0 and due == sorted(due) and due[-1] < 100.0
    assert 4500 < len(due) < 5500
    gaps = [b - a for a, b in itertools.pairwise(due)]
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.05)  # not by the beat


def test_what_ends_first_ends_the_load():
    assert len(list(Schedule(rate=50.0, requests=3, duration_s=100.0).due())) == 3
    assert Schedule(requests=3, duration_s=2.0).more(2, 1.9)
    assert not Schedule(requests=3, duration_s=2.0).more(3, 1.9)
    assert not Schedule(requests=3, duration_s=2.0).more(2, 2.0)


def test_made_up_prompts_differ_and_share_what_they_should():
    first, second = itertools.islice(generated(20, 5, seed=3), 2)
    assert first.turns[0] == second.turns[0] and first.turns[0].role == "system"
    assert len(first.turns[0].text.split()) == 5
    assert first.turns[1] != second.turns[1]
    assert len(first.turns[1].text.split()) == 20
    assert next(generated(20, 5, seed=3)) == first != next(generated(20, 5, seed=4))
    assert [turn.role for turn in next(generated(2, 0, seed=0)).turns] == ["user"]


def test_a_dataset_has_prompts_and_conversations(tmp_path: Path):
    path = tmp_path / "d.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"prompt": "Hi", "other": 1}, {"messages": turns, "max_tokens": 7}]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    plain, conversation = dataset(path)
    assert (plain.text, plain.max_tokens) == ("Hi", None)
    assert [(turn.role, turn.text) for turn in conversation.turns] == [("user", "a"), ("assistant", "b")]
    assert conversation.max_tokens == 7


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"prompt": "a"}\n{"prompt": 1}', "line 2"),
        ('{"messages": []}', "line 1: exactly one"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "line 1: exactly one"),
        ("\n", "no prompts"),
    ],
)
def test_a_faulty_dataset_names_its_line(tmp_path: Path, text: str, fault: str):
    path = tmp_path / "d.jsonl"
    path.write_text(text)
    with pytest.raises(DatasetError, match=fault):
        dataset(path)
    with pytest.raises(DatasetError, match="No such file"):
        dataset(tmp_path / "none")


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "h:1/v1/"])
def test_a_url_is_good_with_or_without_v1(url: str):
    assert base_of(url) == "http://h:1"


def test_percentiles():
    assert [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0, 0.25, 0.5, 0.51, 1)] == [1, 1, 2, 3, 4]
    assert math.isnan(percentile([], 0.5))
    assert Spread.of([]) is None


GOOD = Outcome(1.0, 1.001, 0.5, 2.5, [0.0, 2.0], 3, 10, 4, 5)
UNCOUNTED = Outcome(0.0, 0.0, 0.1, 0.3, [0.2], 2)
BUSY = Outcome(2.0, 2.0, end=4.0, failure=Failure("HTTP 429", "first"))


def test_a_summary_tells_answered_from_failed():
    found = summary([GOOD, UNCOUNTED, BUSY, Outcome(3.0, 3.0, end=1.0, failure=Failure("HTTP 429", "second"))])
    assert (found.requests, found.answered) == (4, 2)
    assert found.seconds == 6.0  # a failed one took its time too
    assert (found.tokens, found.tokens_per_s, found.requests_per_s) == (5 + 2, 7 / 6, 2 / 6)
    assert (found.prompt_tokens, found.cached_tokens) == (10, 4)
    assert found.first_output is not None and found.first_output.max == 0.5
    assert found.per_token is not None and found.per_token.max == pytest.approx(2.0 / 4)
    assert found.between_outputs is not None and found.between_outputs.p50 == 0.2
    assert found.whole_answer is not None and found.whole_answer.max == 2.5
    assert [(failure.kind, failure.count, failure.example) for failure in found.failures] == [("HTTP 429", 2, "first")]
    assert "2  HTTP 429: first" in words(found)


def test_a_sender_that_lags_is_named():
    assert "cannot keep up" in words(summary([Outcome(0.0, 0.5, 0.1, 1.0)]))
    assert "cannot keep up" not in words(summary([GOOD]))


def test_nothing_at_all_has_a_summary():
    assert words(summary([])).startswith("0 requests in 0.00 s")


def test_a_plot_has_a_line_for_each_time():
    drawn = plot([GOOD, UNCOUNTED, BUSY], "a & b")
    assert drawn.count("<polyline") == 3 and "a &amp; b" in drawn
    assert plot([Outcome(0.0, 0.0, 0.1, 0.1, outputs=1)], "one token").count("<polyline") == 2
