"""Figures and tables: colours that everybody can tell apart, captions, sizes."""

import base64
import io
import re
from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from moe_book import figures
from moe_book.typeset import CAPTION

#: Linear RGB as it is seen without one kind of cones (Machado, Oliveira and Fernandes 2009, severity 1).
SEEN = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
TOGETHER = {  # names of COLORS that stand in one figure
    "roles": ["measured", "bound", "sharp", "paper", "reference"],
    "experts": ["linear", "cubic", "relu", "celu", "gelu", "tanh"],
    "routers": ["linear_router", "cosine_router", "perturbed_router"],
    "rules": ["topk_softmax", "softmax_topk", "sampled_topk"],
}


def linear(color):
    rgb = np.array(to_rgb(color))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(color, eye="all cones"):
    """CIE Lab of a colour as an eye sees it; a distance of 10 is plain to see, of 2 hardly."""
    t = XYZ @ np.clip(np.array(SEEN[eye]) @ linear(color), 0, 1) / XYZ.sum(1)
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.fixture
def shown(monkeypatch):
    """What is displayed, and its metadata."""
    found = []
    monkeypatch.setattr(figures, "display", lambda data, metadata, raw: found.append((data, metadata)))
    yield found
    plt.close("all")


def on_phone(shown):
    """The narrow drawing of the figure that was shown."""
    return Image.open(io.BytesIO(base64.b64decode(shown[0][1]["image/png"]["phone"])))


def closest(colors, eye):
    pairs = combinations(colors, 2)
    return min((np.linalg.norm(lab(a, eye) - lab(b, eye)), a, b) for a, b in pairs)


@pytest.mark.parametrize("eye", SEEN)
@pytest.mark.parametrize("group", TOGETHER)
def test_colors_that_stand_together_are_told_apart(group, eye):
    distance, *pair = closest([figures.COLORS[name] for name in TOGETHER[group]], eye)
    assert distance > 10, pair


@pytest.mark.parametrize("eye", SEEN)
def test_categories_are_told_apart(eye):
    distance, *pair = closest(figures.categories(6), eye)
    assert distance > 10, pair
    assert len(set(figures.categories(8))) == 8 and figures.categories(10)[8:] == figures.categories(2)


def test_a_bad_palette_would_be_noticed():
    red, green = "#D00000", "#608000"
    assert closest([red, green], "all cones")[0] > 90 and closest([red, green], "deuteranopia")[0] < 8


def test_every_color_belongs_to_a_group_and_stands_out_from_white():
    assert set(figures.COLORS) == {name for names in TOGETHER.values() for name in names}
    for color in (*figures.COLORS.values(), *figures.categories(8)):
        assert 1.05 / (XYZ[1] @ linear(color) + 0.05) > 2, color


@pytest.mark.parametrize("eye", SEEN)
def test_shades_grow_darker(eye):
    light = [lab(color, eye)[0] for color in figures.shades(5)]
    assert len(figures.shades(5)) == 5 and (np.diff(light) < -4).all()


def test_a_figure_is_shown_with_caption_and_alternative_text_and_closed(shown):
    fig, ax = figures.panels()
    ax.plot([0, 1], [0, 1])
    figures.show(fig, "The <b>line</b> $a<b$ rises.", 'A "line" & more.')
    (figure, about), (caption, mark) = shown
    assert figure.keys() == {"image/png", "text/plain"} and figure["text/plain"] == '[A "line" & more.]'
    assert about["image/png"]["alt"] == 'A "line" & more.' and mark == {CAPTION: True}
    assert {*caption.values()} == {"The <b>line</b> $a<b$ rises."}
    image = Image.open(io.BytesIO(base64.b64decode(figure["image/png"])))
    assert image.size == (870, 510) and image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    assert image.mode == "P" and len(figure["image/png"]) < 40_000
    assert not plt.fignum_exists(fig.number)


@pytest.mark.parametrize(
    ("rows", "columns", "titled", "down", "beside"),
    [
        (1, 2, True, 2, 1),
        (2, 2, False, 4, 1),
        (2, 4, True, 4, 2),
        (1, 3, True, 3, 1),
        (2, 3, False, 3, 2),
        (3, 3, False, 6, 2),
    ],
)
def test_panels_side_by_side_are_stacked_for_a_phone(shown, rows, columns, titled, down, beside):
    """Each has its title, labels and ticks where it stands now, and the legend is no wider than the figure."""
    fig, axes = figures.panels(rows, columns, height=2.0, sharex=True, sharey=True, squeeze=False)
    for n, ax in enumerate(axes.flat):
        ax.plot([0, 1], [0, n], label=f"a line with a long label, {n}")
        ax.set_title(f"panel {n}" if titled or n < columns else "")
    for first in axes[:, 0]:
        first.set_ylabel("height")
    fig.legend(loc="outside upper center", ncol=4)
    figures.show(fig, "Caption.", "Alternative text.")
    stacked, about = on_phone(shown), shown[0][1]["image/png"]
    assert stacked.width == round(150 * figures.NARROW) and stacked.height >= 300 * down and about["stacked"]
    places = [ax.get_subplotspec() for ax in axes.flat]
    assert {place.get_gridspec().get_geometry() for place in places} == {(down, beside)}
    each = beside * -(-rows // beside)  # places that a column takes
    found = [n if titled else each * (n % columns) + n // columns for n in range(rows * columns)]
    assert [place.num1 for place in places] == found
    for ax, place in zip(axes.flat, places, strict=True):
        assert ax.get_ylabel() == ("height" if place.is_first_col() else "")
        assert ax.yaxis.get_tick_params()["labelleft"] or not place.is_first_col()
        assert ax.xaxis.get_tick_params()["labelbottom"] or not place.is_last_row()
    (legend,) = fig.legends
    assert legend.get_window_extent().width <= fig.bbox.width
    assert len(legend.get_texts()) == rows * columns


@pytest.mark.parametrize("rows", [1, 2])
def test_a_phone_shows_a_panel_as_wide_as_itself(shown, rows):
    """Its legend has fewer columns and takes no room from the panels; labels that would be cut have several lines."""
    fig, axes = figures.panels(rows, 1, height=2.0, squeeze=False)
    for ax in axes.flat:
        for m in range(3):
            ax.plot([0, 1], [0, m], label=f"line {m} with a label")
        ax.legend(ncol=3)
        ax.set(xlabel="a label that is longer than the axis of which it tells $a + b + c$ in words", ylabel="y")
        ax.set_title("a title that is longer than its panel and longer than the whole figure")
    fig.legend(handles=[*axes[0, 0].lines], loc="outside upper center", ncol=3)
    figures.show(fig, "Caption.", "Alternative text.")
    drawn, about = on_phone(shown), shown[0][1]["image/png"]
    assert drawn.width == round(150 * figures.NARROW) and drawn.height > 300 * rows and not about["stacked"]
    fig.draw_without_rendering()
    for ax in axes.flat:
        for text in (ax.title, ax.xaxis.label):
            box = text.get_window_extent()
            assert "\n" in text.get_text() and 0 <= box.x0 < box.x1 <= fig.bbox.width
        assert "$a + b + c$" in ax.get_xlabel() and ax.get_ylabel() == "y"
        assert ax.get_legend().get_window_extent().width <= ax.bbox.width and len(ax.get_legend().get_texts()) == 3
    assert fig.legends[0].get_window_extent().width <= fig.bbox.width


@pytest.mark.parametrize(("width", "phone", "wide"), [(3.9, False, False), (5.8, True, False), (6.4, False, True)])
def test_what_is_narrow_stays_and_what_is_wide_scrolls(shown, width, phone, wide):
    figures.show(figures.panels(width=width)[0], "Caption.", "Alternative text.")
    about = shown[0][1]["image/png"]
    assert ("phone" in about, "wide" in about) == (phone, wide)


@pytest.mark.parametrize(("caption", "alt"), [("", "text"), ("text", " \n")])
def test_bad_captions_are_refused(shown, caption, alt):
    with pytest.raises(ValueError, match=r"^(caption|alt): expected a sentence"):
        figures.show(figures.panels()[0], caption, alt)
    assert not shown


def test_panels_have_the_size_they_are_asked_for(shown):
    fig, axes = figures.panels(3, 2, height=2.0, width=6.5, sharex=True)
    assert axes.shape == (3, 2) and fig.get_size_inches().tolist() == [6.5, 6.0]
    assert not axes[0, 0].spines["top"].get_visible() and fig.get_layout_engine() is not None


def test_the_legend_stands_above_the_axes(shown):
    fig, ax = figures.panels()
    ax.plot([0, 1], [0, 1], label="one")
    ax.plot([0, 1], [1, 0], label="two")
    figures.legend_above(fig, ax)
    fig.canvas.draw()
    (legend,) = fig.legends
    assert [text.get_text() for text in legend.get_texts()] == ["one", "two"]
    assert legend.get_window_extent().y0 >= ax.get_window_extent().y1


def test_a_spread_is_from_the_least_to_the_largest_about_the_mean():
    fig, ax = figures.panels()
    figures.spread(ax, [1, 2], np.array([[1.0, 2.0, 6.0], [4.0, 4.0, 4.0]]), "#0072B2", "open", ":")
    (line,), (area,) = ax.lines, ax.collections
    assert line.get_ydata().tolist() == [3, 4] and line.get_markerfacecolor() == "white"
    assert area.get_paths()[0].get_extents().intervaly.tolist() == [1, 6]
    plt.close(fig)


def test_formulas_in_cells_and_labels_of_several_words(shown):
    frame = pd.DataFrame({r"slope $|\ell'|$": ["$x<y$"]}, index=pd.Index([("one", "in $K$")], tupleize_cols=False))
    figures.table(frame, "A caption.")
    for part in (r"<th>slope \(|\ell'|\)</th>", r"<td>\(x&lt;y\)</td>", r"<th>one, in \(K\)</th>"):
        assert part in shown[0][0]["text/html"]


def test_the_name_of_the_index_stands_beside_those_of_the_columns(shown):
    figures.table(pd.DataFrame({"a": [1.0], "b": [2.0]}, index=pd.Index([3], name="$M$")), "A caption.")
    (head,) = re.findall(r"<tr.*?</tr>", shown[0][0]["text/html"].partition("</thead>")[0], re.DOTALL)
    assert re.findall("<th>(.*?)</th>", head) == [r"\(M\)", "a", "b"]


def test_captions_and_alternative_texts_are_one_line(shown):
    figures.show(
        figures.panels()[0],
        """A caption
of two lines.""",
        """What is to be
seen.""",
    )
    figures.table(pd.DataFrame({"a": [1.0]}), "A caption\nof a table.")
    assert shown[0][1]["image/png"]["alt"] == "What is to be seen."
    assert [shown[i][0]["text/markdown"] for i in (1, 3)] == ["A caption of two lines.", "A caption of a table."]


def test_a_forest_has_points_intervals_and_marks_from_above():
    fig, ax = figures.panels()
    values = {"one": [1.0, 2.0], "two": [3.0]}
    intervals = {"one": (1.5, 1.0, 2.5), "two": (3.0, 2.0, 5.0)}
    figures.forest(ax, values, intervals, marks={"two": [4.0]})
    assert [label.get_text() for label in ax.get_yticklabels()] == ["one", "two"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]
    bars = [c.get_segments()[0][:, 0].tolist() for c in ax.collections]
    assert bars == [[1.0, 2.5], [2.0, 5.0]]
    points = [line for line in ax.lines if line.get_marker() == "."]
    assert [list(line.get_xdata()) for line in points] == [[1.0, 2.0], [3.0]]
    diamonds = [line for line in ax.lines if line.get_marker() == "D"]
    assert [list(line.get_xdata()) for line in diamonds] == [[], [4.0]]
    plt.close(fig)


def test_a_course_is_the_middle_of_the_runs_and_their_range():
    fig, ax = figures.panels()
    runs = np.array([[1.0, 2.0], [4.0, 8.0]])
    figures.course(ax, [50, 100], runs, "#0072B2", "mean")
    figures.course(ax, [50, 100], runs, "#0072B2", "least", style="--", middle=np.min)
    (mean, least), (area, _) = ax.lines, ax.collections
    assert mean.get_ydata().tolist() == [2.5, 5] and least.get_ydata().tolist() == [1, 2]
    assert area.get_paths()[0].get_extents().intervaly.tolist() == [1, 8] and least.get_linestyle() == "--"
    plt.close(fig)


def test_a_band_is_the_middle_of_the_values_about_their_root_mean_square(shown):
    _, ax = figures.panels()
    values = np.stack([np.linspace(1, 3, 21), np.linspace(10, 30, 21)])
    figures.band(ax, [100, 1000], values, "#0072B2", label="error")
    (line,), (area,) = ax.lines, ax.collections
    assert line.get_ydata() == pytest.approx(np.sqrt((values**2).mean(1))) and line.get_label() == "error"
    ends = area.get_paths()[0].vertices
    assert (ends[:, 1].min(), ends[:, 1].max()) == pytest.approx((1.1, 29))
    assert ax.get_xscale() == ax.get_yscale() == "log"


def test_plain_ticks_are_the_values_and_no_others(shown):
    fig, ax = figures.panels()
    ax.loglog([1, 100], [1, 100])
    figures.plain_ticks(ax.xaxis, [1, 20, 100])
    fig.canvas.draw()
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1", "20", "100"]
    assert not any(t.get_text() for t in ax.get_xticklabels(minor=True))


@pytest.mark.parametrize(
    ("values", "ticks"), [([1, 4], [1, 2, 3]), ([0.9, 60], [1, 3, 10, 30]), ([0.5, 2000], [1, 10, 100, 1000])]
)
def test_few_ticks_are_at_most_four_within_the_values(values, ticks):
    fig, ax = plt.subplots()
    ax.loglog(values, values)
    figures.few_ticks(ax.xaxis, values)
    assert ax.get_xticks().tolist() == ticks
    plt.close(fig)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([1e-5, 1e3], [1e-5, 1e-2, 10]),
        ([1e-8, 1e-6], [1e-8, 1e-7, 1e-6]),
        ([1e4, 1e6], [1e4, 1e5, 1e6]),
        ([1.1, 1.9], [1.2, 1.5, 1.8]),
        ([6, 9], [6, 7, 8, 9]),
        ([0.1, 0.3], [0.1, 0.2, 0.3]),
        ([3, 3], [3]),
        ([3.7, 3.7], [3.7]),
    ],
)
def test_few_ticks_at_any_size(values, ticks):
    fig, ax = plt.subplots()
    figures.few_ticks(ax.yaxis, values)
    assert ax.get_yticks().tolist() == ticks
    plt.close(fig)


@pytest.mark.parametrize("values", [[0, 1], [-1, 1], [1, np.inf], [1, np.nan]])
def test_bad_values_get_no_ticks(values):
    with pytest.raises(ValueError, match="values: expected finite numbers > 0, got"):
        figures.few_ticks(plt.figure().gca().xaxis, values)
    plt.close()


def test_a_table_rounds_escapes_and_has_a_caption(shown):
    figures.table(pd.DataFrame({"<a>": [1.23456, np.nan], "n": [3, 4]}, index=["x & y", "z"]), "Of $x$.", digits=3)
    (table, _), (caption, _) = shown
    html = table["text/html"]
    for part in (
        "&lt;a&gt;",
        "<td>1.235</td>",
        "<td>–</td>",
        "<td>3</td>",
        "x &amp; y",
        'class="dataframe book-table mathjax_process"',
    ):
        assert part in html
    assert caption["text/markdown"] == "Of $x$." and "<a>" not in html
    assert table["text/plain"].split() == ["<a>", "n", "x", "&", "y", "1.235", "3", "z", "–", "4"]
