"""Plots of the results."""

from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, RED, GREY = "#0072B2", "#D55E00", "#999999"
COLOURS = (BLUE, RED, "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
OURS = "windve"


def panels(size: tuple[float, float], columns: int = 1, rows: int = 1, *, alike: bool = False) -> list[Axes]:
    """The panels of a new figure, row by row. `alike`: with shared axes."""
    figure = Figure(figsize=size, layout="constrained")
    every = list(figure.subplots(rows, columns, squeeze=False, sharex=alike, sharey=alike).flat)
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
    return every


def figure_of(every: Sequence[Axes]) -> Figure:
    figure = every[0].figure
    assert isinstance(figure, Figure)
    return figure


def bars(every: Sequence[Axes], panels: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw a bar per name in each of `panels` (label -> name -> values); its length is the median. Names are in the
    order of the first panel, from the top; windve's are blue.
    """
    names = list(next(iter(panels.values())))
    for axes, (label, measured) in zip(every, panels.items(), strict=True):
        for place, name in enumerate(reversed(names)):
            values = measured.get(name) or [0.0]
            axes.barh(place, median(values), color=BLUE if name.startswith(OURS) else GREY)
            axes.plot(values, [place] * len(values), "k.", markersize=4)
        axes.set_yticks(range(len(names)), list(reversed(names)) if axes is every[0] else [])
        axes.set_xlabel(label)
