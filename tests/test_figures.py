"""Figures over several runs: zeros, NaN and infinity have a mark and a count, panels keep their order (case I1)."""

import io

import numpy as np
import pandas as pd
import pytest
import tables
from matplotlib.figure import Figure
from PIL import Image

from harness.errors import HarnessError
from harness.figures.budget import error_budget
from harness.figures.canvas import MARKERS, STYLES, marker, style
from harness.figures.choice import telling
from harness.figures.front import pareto_figure
from harness.figures.gates import gate_figure
from harness.figures.grid import drift_grid


def text_of(figure: Figure) -> str:
    """All sentences under and above a figure."""
    return " ".join(text.get_text() for text in figure.texts).replace("\n", " ")


def marks(axis, kind: str, colour: str | None = None) -> list[tuple[float, float]]:
    """Points drawn with a marker, all or those of one colour."""
    lines = [l for l in axis.get_lines() if l.get_marker() == kind and colour in (None, l.get_color())]
    return [tuple(point) for l in lines for point in l.get_xydata().tolist()]


def test_panels_stand_in_order_and_hold_their_own_rows():
    """Faults: rings in the order of the file, a precision's panel under another's title, panels swapped."""
    figure = drift_grid(tables.quantiles())
    axes = np.array(figure.axes).reshape(2, 3)
    assert [a.get_ylabel() for a in axes[:, 0]] == ["ring.length\n16", "ring.length\n32"]
    titles = [a.get_title(loc="left") for a in axes[0]]
    assert titles == ["precision.name own", "precision.name bf16", "precision.name exact"]
    black = [l for l in axes[0, 0].get_lines() if l.get_color() == STYLES["exact_recurrent"][0]]
    assert black[1].get_ydata()[-1] == pytest.approx(tables.LEVEL["exact_recurrent"], rel=1e-6)


def test_a_grid_draws_and_counts_what_no_log_axis_shows(tmp_path):
    """Fault (I1): an exact panel is empty, a failure is a gap in a line."""
    figure = drift_grid(tables.quantiles())
    own, bf16, exact = figure.axes[:3]
    bins = len(tables.TOKENS)
    assert len(marks(exact, "o")) == bins * len(tables.VARIANTS) and not marks(own, "o")
    crosses = {name: marks(bf16, "x", style(name)[0]) for name in tables.VARIANTS}
    assert {name: [x for x, _ in found] for name, found in crosses.items()} == {
        "exact_recurrent": [],
        "chunked_fp32": [10000.0],
        "chunked_bf16": [10000.0],
    }
    said = text_of(figure)
    assert f"exact_recurrent: {2 * bins} of {6 * bins} exact zeros" in said
    assert f"chunked_bf16: 2 of {6 * bins} NaN" in said and f"chunked_fp32: 2 of {6 * bins} inf" in said
    figure.savefig(tmp_path / "grid.png")


def test_a_band_that_reaches_zero_or_infinity_is_not_cut_away():
    """Fault: a bin whose best rows are exact, or whose worst are infinite, has no band at all."""
    frame = tables.quantiles(("own",), (16,))
    frame.loc[frame["quantile"] < 0.2, "kept_fro"] = 0
    frame.loc[frame["quantile"] > 0.9, "kept_fro"] = np.inf
    (axis,) = drift_grid(frame).axes
    low, high = axis.get_ylim()
    for band in axis.collections:
        heights = band.get_paths()[0].vertices[:, 1]
        assert heights.min() < low and heights.max() > high and np.isfinite(heights).all()


def test_rows_and_quantiles_make_one_picture():
    """Fault: a grid of rows pools over runs that a grid of quantiles keeps apart."""
    frame = pd.DataFrame({"variant": "exact_recurrent", "flush": [0, 1, 0, 1], "tokens": [10, 20, 10, 20]})
    frame = frame.assign(**{"decode.family": ["silu", "silu", "loop24", "loop24"], "kept_fro": [1e-6, 0, 1e-5, np.nan]})
    figure = drift_grid(frame, rows=None, columns="decode.family")
    assert [a.get_title(loc="left") for a in figure.axes] == ["decode.family silu", "decode.family loop24"]
    silu, loop = figure.axes
    assert len(marks(silu, "o")) == 1 and len(marks(loop, "x")) == 1
    assert "1 of 4 exact zeros" in text_of(figure) and "1 of 4 NaN" in text_of(figure)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"columns": "decode.family"}, "decode.family: not a column"),
        ({"columns": None}, "precision.name: own, bf16, exact would be drawn as one in panel 16"),
        ({"variants": ["exact_fold"]}, "variants: 'exact_fold' has no kept_fro"),
        ({"error": "o_med"}, "o_med: not a column"),
    ],
)
def test_a_grid_refuses_what_it_cannot_tell_apart(how, says):
    """Faults: runs of two precisions pooled in a line, a misspelt variant drawn as nothing."""
    with pytest.raises(HarnessError, match="^" + says.replace("(", r"\(")):
        drift_grid(tables.quantiles(), **how)


def test_quantiles_of_several_seeds_are_not_pooled():
    """Fault: of two runs' quantiles in one bin the last one is drawn."""
    frame = pd.concat([tables.quantiles(), tables.quantiles()])
    with pytest.raises(HarnessError, match="quantiles of several runs"):
        drift_grid(frame)


def test_a_metric_that_a_variant_never_had_is_no_failure():
    """Fault: a variant without a kept state is drawn as one whose kept state is NaN, or vanishes unmentioned."""
    frame = tables.quantiles(("own",))
    frame.loc[frame["variant"] == "chunked_bf16", "kept_fro"] = np.nan
    frame.attrs["missing"] = {"chunked_bf16": ["kept_fro"]}
    figure = drift_grid(frame)
    assert "chunked_bf16" not in [text.get_text() for text in figure.legends[0].get_texts()]
    assert not marks(figure.axes[0], "x") and "Without kept_fro: chunked_bf16." in text_of(figure)


def test_a_budget_draws_every_site_once():
    """Fault (I1): a site that does nothing, or destroys everything, is no mark; sites in another order per panel."""
    parts = {"a": {"step": 3e-7, "gate": 0.0}, "b": {"step": np.nan, "gate": 4e-3, "fold": np.inf}}
    figure = error_budget(tables.budget_levels(parts, {"a": 3e-7, "b": 5e-3}))
    left, right = figure.axes
    order = [label.get_text() for label in left.get_yticklabels()]
    assert sorted(order) == ["fold", "gate", "step"]
    heights = {"step": order.index("step"), "gate": order.index("gate"), "fold": order.index("fold")}
    assert [y for _, y in marks(left, "o")] == [heights["gate"]]
    assert (3e-7, heights["step"]) in marks(left, marker("a"))
    assert {y for _, y in marks(right, "x")} == {heights["step"], heights["fold"]}
    said = text_of(figure)
    assert all(x in said for x in ("a: 1 of 2 exactly zero", "b: 1 of 3 NaN", "b: 1 of 3 inf"))
    assert "No run keeps decay, key" in said.replace("gate, ", "")


def test_a_front_draws_every_point_and_joins_its_own():
    """Fault (I1): the exact, the failed or the costless point is missing; the line passes through others."""
    points = [("a", 1, 1e-2), ("a", 4, 1e-6), ("a", 5, 1e-3), ("b", 8, 0.0), ("b", 2, np.nan), ("c", np.nan, 1e-4)]
    figure = pareto_figure(tables.cost_levels(*points))
    (axis,) = figure.axes
    # drawn in shares of the panel
    drawn = {kind: marks(axis, kind) for kind in (marker("a"), marker("b"), marker("c"), "x")}
    assert sum(map(len, drawn.values())) >= len(points)
    (_, failed), ((_, exact), *_), ((costless, _), *_) = drawn["x"][0], drawn[marker("b")], drawn[marker("c")]
    assert failed > 0.9 and exact < 0.1 and costless > 0.9
    line = next(l for l in axis.get_lines() if l.get_drawstyle() == "steps-post")
    assert line.get_xydata().tolist() == [[1, 1e-2], [4, 1e-6]]
    assert [t.get_text() for t in axis.texts if t.get_text().isdigit()] == ["1", "2", "3"]
    said = text_of(figure)
    assert "exact zeros: 1 (b 1)" in said and "NaN or inf: 1 (b 1)" in said and "no bytes_token: 1 (c 1)" in said
    given = pareto_figure(tables.cost_levels(*points), front=[False, False, True, False, True, False])
    line = next(l for l in given.axes[0].get_lines() if l.get_drawstyle() == "steps-post")
    assert line.get_xydata().tolist() == [[5, 1e-3]]
    # a failed design on a front given by hand has its number on the strip
    assert [t.xy[1] > 0.9 for t in given.axes[0].texts if t.get_text().isdigit()] == [True, False]


def test_a_point_is_named_by_what_tells_it_apart():
    """Fault: a caption names precision.base beside precision.name, or leaves the ring out."""
    frame = tables.cost_levels(("a", 1, 1), ("a", 2, 2))
    frame["ring.length"], frame["precision.name"], frame["precision.base"] = [16, 32], ["own", "bf16"], ["own", "bf16"]
    assert telling(frame) == ["ring.length", "precision.name"]
    frame["precision.dots"] = "tf32"
    assert "1 a (ring.length 16, precision.name own)" in text_of(pareto_figure(frame))


def test_gates_that_never_decay_and_errors_that_fail_are_drawn():
    """Fault (I1): a head with infinite memory, an exact or a failed one is not in the picture."""
    table = pd.DataFrame({"run": ["x", "x", "y", "y"], "slot": 0, "head": [0, 1, 0, 1], "variant": "exact_fold"})
    table = table.assign(memory=[10, np.inf, 100, 5.0], decay_low=[0.01, 0, 1e-3, 0.1])
    table = table.assign(decay=[0.1, 0, 1e-2, 0.2], decay_high=[0.2, 0, np.inf, 0.3], kept_fro=[1e-6, 0, np.nan, 1e-5])
    figure = gate_figure(table, "run")
    left, right = figure.axes
    assert len(marks(left, "o")) == 4
    assert len(marks(right, marker("exact_fold"))) == 3 and len(marks(right, "x")) == 1
    for axis, kind in ((left, "o"), (right, marker("exact_fold")), (right, "x")):
        (x0, x1), (y0, y1) = axis.get_xlim(), axis.get_ylim()
        assert all(x0 <= x <= x1 and y0 <= y <= y1 for x, y in marks(axis, kind))
    assert "of 4 marks: 1 exact zeros, 1 NaN, 1 heads that never decay" in text_of(figure)


def test_default_variants_differ_in_colour_marker_and_dash():
    """Fault: two variants look alike to a reader who sees no colours."""
    assert len(set(MARKERS.values())) == len(STYLES) and set(MARKERS) == set(STYLES)
    assert marker("mine") == marker("mine") and style("mine")[0] not in {colour for colour, _ in STYLES.values()}


def test_a_notebook_shows_the_colours_of_the_figure():
    """Faults: the palette of a small image gives up the colour of a thin line, or makes white grey."""
    figure = drift_grid(tables.quantiles())
    axis = figure.add_axes((0, 0, 0.2, 0.2))
    # many shades, as of overlapping bands, compete for the palette
    axis.imshow(np.random.default_rng(0).random((50, 50, 3)), aspect="auto")
    full = io.BytesIO()
    figure.savefig(full, format="png")
    before, after = (np.asarray(Image.open(x).convert("RGB")) for x in (full, io.BytesIO(figure._repr_png_())))
    for colour in ("#FFFFFF", *(style(name)[0] for name in tables.VARIANTS)):
        there = (before == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(-1)
        assert there.sum() > 50, colour
        np.testing.assert_array_equal(after[there], before[there], err_msg=colour)
    assert len(figure._repr_png_()) < 0.6 * len(full.getvalue())
