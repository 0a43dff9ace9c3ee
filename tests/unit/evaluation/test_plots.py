"""Drawings, looked at by what lies on the axes: texts, lines and bars."""

import sys
from itertools import combinations

import pytest

from specdec import Report
from specdec.evaluation import plots
from specdec.evaluation.speed_up import MEANING, SpeedUp
from tests.unit.engine.test_trace import TREE

pyplot = pytest.importorskip("matplotlib.pyplot")
colors = pytest.importorskip("matplotlib.colors")


@pytest.fixture(autouse=True)
def _no_screen():
    pyplot.switch_backend("Agg")
    yield
    pyplot.close("all")


class Words:
    def decode(self, tokens):
        return "".join(f"<{token}>" for token in tokens)


def report(accepted, seconds=1.0):
    made = Report(num_calls=1, num_output_tokens=10)
    made.record_round([3, 3], [3, 3], accepted, seconds, "someone")
    made.seconds |= {"prefill": 0.5, "draft": seconds, "verify": 2.0}
    return made


def lines(axes, colour):
    return [line for line in axes.lines if colors.same_color(line.get_color(), colour)]


def test_a_tree_shows_each_node_and_the_accepted_path():
    axes = plots.round_tree(TREE, Words())
    said = {text.get_text(): text for text in axes.texts}
    assert list(said) == ["'<7>'", *("'<1>'\np=0.25", "'<2>'\np=0.50", "'<3>'\np=0.12", "'<4>'\np=0.75"), "'<9>'"]
    assert len(lines(axes, plots.ACCEPTED)) == len(TREE.path) - 1
    assert len(lines(axes, plots.REJECTED)) == 2
    [own] = lines(axes, plots.BONUS)
    assert colors.same_color(said["'<9>'"].get_color(), plots.BONUS)
    assert list(own.get_xdata()) == [2, 3]  # from the last accepted depth to the next
    assert axes.get_title() == "4 drafted, 2 accepted, 3 new tokens"


@pytest.mark.parametrize("path", [[0], [0, 1], [0, 2], [0, 2, 3]])
def test_no_node_lies_on_another(path):
    tree = type(TREE)(**(vars(TREE) | {"path": path}))
    axes = plots.round_tree(tree)
    places = [text.get_position() for text in axes.texts]
    for (x, y), (other_x, other_y) in combinations(places, 2):
        assert x != other_x or abs(y - other_y) >= 1


def test_acceptance_is_the_reports():
    made = {"one": report([3, 1]), "two": report([0, 2])}
    axes = plots.acceptance_per_position(made)
    for line, of in zip(axes.lines, made.values(), strict=True):
        assert list(line.get_xdata()) == [1, 2, 3]
        assert list(line.get_ydata()) == pytest.approx(of.conditional_acceptance_rate_per_pos)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "one (3.00 tokens per draft)",
        "two (2.00 tokens per draft)",
    ]


def test_bars_are_the_reports_seconds_by_token():
    axes = plots.time_per_part({"slow": report([3, 1], 4.0), "fast": report([3, 1], 1.0)})
    ends = [bar.get_x() + bar.get_width() for bar in axes.containers[-1]]
    assert ends == pytest.approx([650, 350])  # 6.5 s and 3.5 s over ten tokens
    assert [label.get_text() for label in axes.get_yticklabels()] == ["slow", "fast"]


def test_one_report_needs_no_name_and_axes_may_be_given():
    axes = pyplot.figure().subplots()
    assert plots.time_per_part(report([1, 1]), ax=axes) is axes
    assert plots.acceptance_per_position(report([1, 1]), ax=axes) is axes


def test_a_report_without_drafts_says_so():
    axes = plots.acceptance_per_position({"plain": Report()})
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["plain (no drafts)"]


def test_speed_ups_are_the_tables_and_clear_of_the_lines():
    found = {"near": SpeedUp((0.98, 1.02), 0.9, 1.1), "fast": SpeedUp((1.0, 4.0), 1.9, 99.0), "once": SpeedUp((1.5,))}
    axes = plots.speed_ups(found)
    axes.figure.canvas.draw()
    assert [text.get_text() for text in axes.texts] == ["1.00x (0.90 to 1.10)", "2.00x (too noisy)", "1.50x"]
    assert [bar.get_width() for [bar] in axes.containers] == pytest.approx([1.0, 2.0, 1.5], abs=0.001)
    inside = axes.get_window_extent()
    assert all(text.get_window_extent().x0 >= inside.x1 for text in axes.texts)
    assert axes.get_xlim()[1] < 5  # an interval without end leaves the bars readable
    assert MEANING in axes.get_xlabel()


def test_speed_ups_by_prompt_give_the_same_value():
    assert plots.speed_ups({"fast": [1.0, 4.0]}).texts[0].get_text() == "2.00x"


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ImportError, match=r"^specdec.evaluation.plots draws with matplotlib, .*: pip install matplotlib$"
    ):
        plots.time_per_part(Report())
