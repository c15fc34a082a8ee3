"""One style and one palette for every figure of the book.

Figures are drawn on white with dark ink; in dark mode the book's style sheet inverts lightness and
keeps hue, so one picture serves both. They are narrow with large type, so that they read on a phone.
"""

import base64
import io
import math
import re
from itertools import cycle, islice
from textwrap import wrap

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from IPython.display import display
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.patches import Circle
from matplotlib.ticker import FixedLocator, MaxNLocator
from PIL import Image

from moe_book.typeset import CAPTION

NARROW = 3.9  # inches of a figure as a phone shows it, its panels below each other
WIDE = 6  # inches from which a single panel would be illegible so narrow, so that a phone scrolls it

#: Colours by what they show, the same through the whole book (from Okabe and Ito's colour-blind-safe set).
COLORS = {
    "measured": "#0072B2",
    "bound": "#D55E00",
    "sharp": "#009E73",
    "paper": "#CC79A7",
    "reference": "#56606B",
    "linear": "#E69F00",
    "cubic": "#0072B2",
    "relu": "#009E73",
    "celu": "#CC79A7",
    "gelu": "#D55E00",
    "tanh": "#56B4E9",
    "linear_router": "#E69F00",
    "cosine_router": "#009E73",
    "perturbed_router": "#0072B2",
    "topk_softmax": "#882255",
    "softmax_topk": "#E69F00",
    "sampled_topk": "#0072B2",
}

_CATEGORIES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#56606B"]


def categories(n: int) -> list[str]:
    """n colours for clusters, experts or anything else that is only told apart."""
    return list(islice(cycle(_CATEGORIES), n))


def shades(n: int) -> list[str]:
    """n colours in an order, light to dark: for experts selected, stages of training, sizes."""
    return sns.color_palette("flare", n).as_hex()


def use_style() -> None:
    """Apply the book's style to matplotlib."""
    sns.set_theme(
        context="notebook",
        style="whitegrid",
        palette=_CATEGORIES,
        rc={
            "figure.figsize": (5.8, 3.7),
            "figure.constrained_layout.use": True,
            "font.size": 12,
            "axes.titlesize": 12,
            "axes.labelsize": 12,
            "legend.fontsize": 10.5,
            "legend.frameon": False,
            "legend.handlelength": 3.0,
            "axes.edgecolor": "#444444",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "grid.color": "#DDDDDD",
            "lines.linewidth": 2.0,
        },
    )


def panels(rows: int = 1, columns: int = 1, *, height: float = 3.4, width: float = 5.8, **kwargs):
    """`plt.subplots` in the book's style; `height` is of one row, `width` of the figure, in inches."""
    use_style()
    return plt.subplots(rows, columns, figsize=(width, height * rows), **kwargs)


def legend_above(figure: Figure, axes, columns: int = 2) -> None:
    """Put the legend of `axes` above the figure, where it covers no data."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncol=columns)


def moved_points(ax, points, *ends, title: str, symbol: str = "s_{i,%d}", circle: bool = True) -> None:
    """Points of the plane (k, 2), each in its colour, with arrows to its open counterparts in `ends`, each (k, 2).

    With `circle` the unit circle is drawn, and the frame is a little larger than it.
    """
    if circle:
        ax.add_patch(Circle((0, 0), 1, fill=False, ls="--", color=COLORS["reference"]))
        ax.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15))
    for i, color in enumerate(categories(len(points))):
        ax.plot(*points[i], "o", color=color)
        for end in ends:
            if np.hypot(*(end[i] - points[i])) > 0.05:
                ax.annotate("", end[i], points[i], arrowprops=dict(arrowstyle="->", color=color, lw=1.2))
            ax.plot(*end[i], "o", color=color, mfc="none", ms=9)
    ax.set(title=title, xlabel=f"${symbol % 1}$", ylabel=f"${symbol % 2}$")
    ax.set_aspect("equal")


def band(ax, sizes, values, color: str, label: str | None = None, style: str = "-") -> None:
    """Root mean square of `values` (sizes, repetitions) on log-log axes, and the band of their middle 90%."""
    ax.loglog(sizes, np.sqrt((values**2).mean(1)), style, color=color, label=label, marker="o", ms=4)
    ax.fill_between(sizes, *np.quantile(values, [0.05, 0.95], axis=1), color=color, alpha=0.2, lw=0)


def spread(ax, x, y, color: str, label: str | None = None, style: str = "-") -> None:
    """Means of `y` (sizes, repetitions), and the band from the least to the largest; dotted lines have open markers."""
    face = "white" if style == ":" else color
    ax.plot(x, y.mean(1), style, color=color, label=label, marker="o", ms=4, markerfacecolor=face)
    ax.fill_between(x, y.min(1), y.max(1), color=color, alpha=0.2, lw=0)


def course(ax, steps, runs, color: str, label: str, *, style: str = "-", middle=np.mean) -> None:
    """The middle of `runs` (runs, steps) at each step, and the band from the least to the largest.

    `middle(runs, 0)` is the mean; on a logarithmic axis take `scipy.stats.gmean`.
    """
    ax.plot(steps, middle(runs, 0), style, color=color, label=label)
    ax.fill_between(steps, runs.min(0), runs.max(0), color=color, alpha=0.25, lw=0)


def forest(ax, values, intervals, *, marks=None) -> None:
    """A line for each name: its values as points, mean and interval (mean, low, high), and diamonds at its marks.

    Args:
        ax: the axes; 0 has a vertical line.
        values: by name some values; intervals: by name what is drawn over them.
        marks: by name values reported elsewhere, where there are any.
    """
    for i, name in enumerate(values):
        mean, low, high = intervals[name]
        ax.plot(values[name], [i] * len(values[name]), ".", color=COLORS["measured"], alpha=0.5)
        ax.errorbar(mean, i, xerr=[[mean - low], [high - mean]], fmt="o", color="black", capsize=4)
        reported = (marks or {}).get(name, [])
        ax.plot(reported, [i] * len(reported), "D", color=COLORS["paper"], ms=6)
    ax.axvline(0, color="black", lw=0.8)
    ax.set_yticks(range(len(values)), list(values))
    ax.set_ylim(len(values) - 0.5, -0.5)


def power_law(ax, sizes, power: float, first: float, style: str = "--") -> None:
    """The line `first * (K / K_1)^power` over sizes K on log-log axes, labelled with its power."""
    line = first * (np.asarray(sizes, float) / sizes[0]) ** power
    ax.plot(sizes, line, style, color=COLORS["reference"], lw=1.2, label=f"$K^{{{power:g}}}$")


def plain_ticks(axis, values) -> None:
    """Ticks at `values` only, written as plain numbers, on a logarithmic axis; call it after plotting."""
    axis.set_major_locator(FixedLocator(values))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def few_ticks(axis, values) -> None:
    """Two to four plain ticks on a logarithmic axis, within the range of `values`; one if they are all equal.

    Raises:
        ValueError: for values that are not finite and positive.
    """
    low, high = float(np.min(values)), float(np.max(values))
    if not 0 < low <= high < np.inf:
        raise ValueError(f"values: expected finite numbers > 0, got {low!r} to {high!r}")
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    for digits in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [tick for p in powers for d in digits if low <= (tick := float(f"{d}e{p}")) <= high]
        if len(ticks) <= 4:
            break
    ticks = ticks[:: math.ceil(len(ticks) / 4) or 1]
    if len(ticks) < 2:  # less than a decade, between two such numbers
        between = MaxNLocator(3).tick_values(low, high)
        ticks = [float(f"{tick:.12g}") for tick in between if low <= tick <= high] or [low]
    plain_ticks(axis, ticks)


def palette(png: bytes) -> bytes:
    """A PNG of at most 256 colours, as its figure has them but for the softest edges: a third of the bytes."""
    out = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return min(png, out.getvalue(), key=len)


def _display(shown: dict, caption: str, metadata: dict) -> None:
    """Display something, and below it its caption, as Markdown: that is what every viewer of notebooks shows."""
    caption = " ".join(caption.split())
    display(shown, metadata=metadata, raw=True)
    display({"text/markdown": caption, "text/plain": caption}, metadata={CAPTION: True}, raw=True)


def show(figure: Figure, caption: str, alt: str) -> None:
    """Display a figure with its caption and alternative text, and close it.

    Args:
        figure: what to show.
        caption: what to see in it; may hold HTML and $mathematics$.
        alt: a description for readers who do not see it.

    Raises:
        ValueError: if caption or alt is empty.
    """
    for name, value in (("caption", caption), ("alt", alt)):
        if not value.strip():
            raise ValueError(f"{name}: expected a sentence, got {value!r}")
    alt = " ".join(alt.split())
    about, image = {"alt": alt}, _png(figure)
    if (stacked := _stack(figure)) or NARROW < figure.get_figwidth() < WIDE:
        about |= {"stacked": stacked, "phone": _phone(figure)}
    elif figure.get_figwidth() >= WIDE:
        about |= {"wide": True}
    plt.close(figure)
    _display({"image/png": image, "text/plain": f"[{alt}]"}, caption, {"image/png": about})


def _png(figure: Figure) -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=150, facecolor="white")
    return base64.b64encode(palette(data.getvalue())).decode()


def _stack(figure: Figure) -> bool:
    """Put panels that stand side by side below each other, as a phone shows them; whether there are any.

    Two columns, and a row of three, become one column; more become two. Column after column, since a column has its
    title above the first panel; row after row where every panel has one.
    """
    placed = [(ax, spec.get_gridspec()) for ax in figure.axes if (spec := ax.get_subplotspec())]
    axes = [ax for ax, _ in placed]
    rows, columns = placed[0][1].get_geometry() if placed else (1, 1)
    if columns == 1 or len(axes) != rows * columns:
        return False
    for i, ax in enumerate(axes):
        ax.set_ylabel(ax.get_ylabel() or axes[i - i % columns].get_ylabel())
    beside = 1 if columns == 2 or (rows, columns) == (1, 3) else 2
    order = axes
    if not all(ax.get_title() for ax in axes):  # each column begins a line of its own
        spare = [None] * (-rows % beside)
        order = [ax for column in range(columns) for ax in (*axes[column::columns], *spare)]
    down = math.ceil(len(order) / beside)
    figure.set_figheight(figure.get_figheight() / rows * down)
    left = axes[0]
    for ax, place in zip(order, GridSpec(down, beside, figure), strict=False):
        if ax is None:
            continue
        ax.set_subplotspec(place)
        if place.is_first_col():  # ticks of a shared axis stood at a neighbour
            ax.tick_params(labelleft=True)
            left = ax
        elif ax.get_ylabel() == left.get_ylabel():
            ax.set_ylabel("")
        if place.is_last_row():
            ax.tick_params(labelbottom=True)
    return True


def _phone(figure: Figure) -> str:
    """A figure as a phone shows it, where letters of a wide one would be too small to read."""
    figure.draw_without_rendering()
    rest = figure.get_figheight() - _legends_height(figure)
    figure.set_size_inches(NARROW, 2 * figure.get_figheight())  # room for legends of any height
    _narrow_legends(figure)
    figure.set_figheight(rest + _legends_height(figure))
    _wrap_labels(figure)
    return _png(figure)


def _legends_height(figure: Figure) -> float:
    return sum(legend.get_window_extent().height for legend in figure.legends) / figure.dpi


def _wrap_labels(figure: Figure) -> None:
    """Titles and labels of axes in as many lines as it takes to stay inside the figure; formulas are not broken."""
    figure.draw_without_rendering()
    for ax in figure.axes:
        for text in (ax.title, ax.xaxis.label, ax.yaxis.label):
            said = re.sub(r"[$][^$]+[$]", lambda formula: formula[0].replace(" ", "\0"), text.get_text())
            for lines in range(2, 5):
                along, end = (0, figure.bbox.width) if text is not ax.yaxis.label else (1, figure.bbox.height)
                low, high = text.get_window_extent().get_points()[:, along]
                if low >= 0 and high <= end:
                    break
                wrapped = wrap(said, math.ceil(1.1 * len(said) / lines), break_long_words=False, break_on_hyphens=False)
                text.set_text("\n".join(wrapped).replace("\0", " "))
                figure.draw_without_rendering()


def _narrow_legends(figure: Figure) -> None:
    """Legends above a figure in as many columns as it is wide enough for; one column where axes are too narrow."""
    for ax in figure.axes:
        legend = ax.get_legend()
        if legend and legend.get_window_extent().width > 0.9 * ax.bbox.width:
            labels = [text.get_text() for text in legend.get_texts()]
            ax.legend(legend.legend_handles, labels, prop=legend.prop)
    for legend in list(figure.legends):
        labels = [text.get_text() for text in legend.get_texts()]
        for n in range(len(labels), 0, -1):
            legend.remove()
            legend = figure.legend(legend.legend_handles, labels, loc="outside upper center", ncol=n)
            figure.draw_without_rendering()
            if legend.get_window_extent().width <= figure.bbox.width:
                break


def _joined(label):
    """A label of several words as one text."""
    return ", ".join(map(str, label)) if isinstance(label, tuple) else label


def table(frame, caption: str, digits: int = 2) -> None:
    """Display a data frame as a table with a caption; floats are rounded to `digits`, `$...$` is typeset.

    The name of the index stands in the row of the names of the columns.
    """
    frame = frame.rename(index=_joined, columns=_joined)
    if frame.index.nlevels == 1 and frame.columns.nlevels == 1 and frame.index.name and not frame.columns.name:
        frame = frame.rename_axis(index=None, columns=frame.index.name)
    how = dict(border=0, classes="book-table mathjax_process", na_rep="–")
    body = frame.to_html(float_format=lambda v: f"{v:.{digits}f}", **how)
    body = re.sub(r"[$]([^$]+)[$]", r"\\(\1\\)", body)  # to_html has escaped what stands in it
    text = frame.to_string(float_format=lambda v: f"{v:.{digits}f}", na_rep="–")
    _display({"text/html": body, "text/plain": text}, caption, {})
