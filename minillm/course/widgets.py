"""Two widgets for lessons: `stepper` (back and next through frames) and `slider_plot` (a plot that follows sliders).

Both are drawn by one function of the lesson. Where no kernel runs (on a repository's page, say) the reader sees a
picture of several steps instead. All text is fixed, so that notebooks can be compared.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from typing import Any

import anywidget
import ipywidgets
import matplotlib
import traitlets
from matplotlib.axes import Axes
from matplotlib.figure import Figure

VIEW = "application/vnd.jupyter.widget-view+json"


def _render(
    draws: Sequence[Callable[[Axes], None]], titles: Sequence[str], size: tuple[float, float], kind: str
) -> bytes:
    """One picture with a panel for each function, at most two side by side."""
    columns = 1 if len(draws) == 1 or size[0] > 7 else 2
    rows = -(-len(draws) // columns)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "minillm", "font.size": 10}):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for ax, draw, title in zip(axes, draws, titles, strict=False):
            draw(ax)
            if title:
                ax.set_title(title, loc="left")
        for ax in axes[len(draws) :]:
            ax.set_axis_off()
        out = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(out, format=kind, dpi=80, metadata=metadata)
    return out.getvalue()


def _bundle(live: Any, png: bytes, text: str) -> Any:
    """The live widget's view with a fixed picture and a fixed text beside it."""
    data = live[0] if isinstance(live, tuple) else live
    fixed = {"image/png": base64.b64encode(png).decode(), "text/plain": text}
    return {**({VIEW: data[VIEW]} if VIEW in data else {}), **fixed}


class Stepper(anywidget.AnyWidget):
    """Shows frames[i], strings of SVG or HTML. Buttons, a slider and the arrow keys move; `i` is the step, from 0."""

    frames = traitlets.List(traitlets.Unicode()).tag(sync=True)
    captions = traitlets.List(traitlets.Unicode()).tag(sync=True)
    i = traitlets.Int(0).tag(sync=True)
    _css = """
    .mini-stepper nav { display: flex; gap: 8px; align-items: center; margin-bottom: 4px; flex-wrap: wrap; }
    .mini-stepper button { padding: 2px 10px; }
    .mini-stepper svg { max-width: 100%; height: auto; background: white; }
    """
    _esm = """
    const make = (tag, props) => Object.assign(document.createElement(tag), props);
    function render({ model, el }) {
      const last = () => model.get("frames").length - 1;
      const move = (to) => { model.set("i", Math.min(last(), Math.max(0, to))); model.save_changes(); };
      const button = (word, by) => make("button",
        { textContent: word, className: `mini-${word}`, onclick: () => move(model.get("i") + by) });
      const back = button("back", -1), next = button("next", 1);
      const bar = make("input", { type: "range", min: 0, className: "mini-range" });
      bar.oninput = () => move(Number(bar.value));
      bar.setAttribute("aria-label", "step");
      bar.dataset.lmSuppressShortcuts = "true";  // else JupyterLab takes the arrow keys
      const label = make("span", { className: "mini-label" });
      label.setAttribute("aria-live", "polite");
      const view = make("div", {}), top = make("nav", {}), box = make("div", { className: "mini-stepper" });
      const show = () => {
        const i = model.get("i");
        bar.max = last(); bar.value = i;
        back.disabled = i === 0; next.disabled = i === last();
        label.textContent = `step ${i + 1} of ${last() + 1}: ${model.get("captions")[i] ?? ""}`.replace(/: $/, "");
        view.innerHTML = model.get("frames")[i];
      };
      top.append(back, bar, next, label); box.append(top, view); el.append(box);
      model.on("change:i", show); model.on("change:frames", show); show();
      return () => { model.off("change:i", show); model.off("change:frames", show); };
    }
    export default { render };
    """

    def __init__(self, frames: Sequence[str], captions: Sequence[str] = (), png: bytes = b"") -> None:
        super().__init__(frames=list(frames), captions=list(captions))
        self._png = png

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return _bundle(super()._repr_mimebundle_(**kwargs), self._png, f"<Stepper with {len(self.frames)} steps>")


def stepper(
    draw: Callable[[Axes, int], None],
    steps: int,
    captions: Sequence[str] = (),
    size: tuple[float, float] = (6.0, 2.6),
    still: Sequence[int] | None = None,
) -> Stepper:
    """A stepper whose frame i is what draw(ax, i) draws. captions[i] says what happens there.

    still: the steps in the fixed picture; None: at most four, spread evenly.
    """
    count = min(4, steps)
    shown = [round(k * (steps - 1) / max(1, count - 1)) for k in range(count)] if still is None else list(still)
    titles = [*captions, *[""] * (steps - len(captions))]

    def at(i: int) -> Callable[[Axes], None]:
        return lambda ax: draw(ax, i)

    frames = []
    for i in range(steps):
        svg = _render([at(i)], [""], size, "svg").decode()
        label = html.escape(titles[i] or f"step {i + 1}", quote=True)
        frames.append(svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{label}"', 1))
    still_titles = [f"step {i + 1}: {titles[i]}".removesuffix(": ") for i in shown]
    return Stepper(frames, titles, _render([at(i) for i in shown], still_titles, size, "png"))


class SliderPlot(ipywidgets.VBox):
    """Sliders above a picture. `sliders` holds them by name; `value` is what they say now."""

    def __init__(self, draw: Callable[..., None], choices: dict[str, Sequence[Any]], start: dict[str, Any],
                 stills: Sequence[dict[str, Any]], size: tuple[float, float]) -> None:  # fmt: skip
        self._draw, self._size = draw, size
        self.sliders = {
            name: ipywidgets.SelectionSlider(
                options=list(values), value=start[name], description=name.replace("_", " "),
                style={"description_width": "initial"}, layout={"width": "420px"},
            )
            for name, values in choices.items()
        }  # fmt: skip
        self._png = _render([self._at(s) for s in stills], [self._text(s) for s in stills], size, "png")
        self._image = ipywidgets.Image(format="png")
        self._label = ipywidgets.Label()
        super().__init__([*self.sliders.values(), self._label, self._image])
        self.add_class("mini-slider-plot")
        self._names = ", ".join(choices)
        for slider in self.sliders.values():
            slider.observe(self._redraw, names="value")
        self._redraw()

    @property
    def value(self) -> dict[str, Any]:
        return {name: slider.value for name, slider in self.sliders.items()}

    def _at(self, values: dict[str, Any]) -> Callable[[Axes], None]:
        return lambda ax: self._draw(ax, **values)

    @staticmethod
    def _text(values: dict[str, Any]) -> str:
        return ", ".join(f"{name.replace('_', ' ')} = {value}" for name, value in values.items())

    def _redraw(self, _: Any = None) -> None:
        self._image.value = _render([self._at(self.value)], [""], self._size, "png")
        self._label.value = self._text(self.value)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return _bundle(super()._repr_mimebundle_(**kwargs), self._png, f"<SliderPlot of {self._names}>")


def slider_plot(
    draw: Callable[..., None],
    start: dict[str, Any] | None = None,
    stills: Sequence[dict[str, Any]] | None = None,
    size: tuple[float, float] = (5.5, 3.2),
    **choices: Sequence[Any],
) -> SliderPlot:
    """A plot that follows its sliders: draw(ax, name=value, ...) draws it; name=[values] makes a slider.

    start: where the sliders begin (default: the first value of each). stills: the settings in the fixed picture
    (default: the start, and the last value of the first slider).
    """
    first = {name: values[0] for name, values in choices.items()} | (start or {})
    name = next(iter(choices))
    return SliderPlot(draw, dict(choices), first, stills or [first, first | {name: choices[name][-1]}], size)
