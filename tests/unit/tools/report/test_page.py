import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import pytest

from tests.unit.tools.report.conftest import CONFIG, event, record, write_metrics
from torchtitan_lite.tools.report import compare, read_run, unique_labels
from torchtitan_lite.tools.report.curves import downsample
from torchtitan_lite.tools.report.figures import duration
from torchtitan_lite.tools.report.page import page

VOID = {"meta", "br", "link", "img"}
ATTACK = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@dataclass
class Parsed(HTMLParser):
    """The page as a browser parses it."""

    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    text: str = ""
    scripts: list[str] = field(default_factory=list)

    def __post_init__(self):
        super().__init__(convert_charrefs=True)
        self._open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        elif not self._open or self._open[-1] != "style":
            self.text += data

    def titles(self, tag: str = "h3") -> list[str]:
        return re.findall(rf"<{tag}>(.*?)</{tag}>", self.source)

    source: str = ""

    @property
    def figures(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])

    def close(self):
        super().close()
        assert not self._open


def shown(*folders) -> Parsed:
    runs = unique_labels([read_run(folder) for folder in folders])
    source = page(runs, [compare(runs[0], other) for other in runs[1:]])
    parsed = Parsed(source=source)
    parsed.feed(source)
    parsed.close()
    return parsed


def traces(parsed: Parsed) -> list[str]:
    return [trace["name"] for figure in parsed.figures.values() for trace in figure["data"]]


def test_one_run(make_run):
    events = [event("validation", 4, 15.0, loss=6.5), event("saved", 4, 16.0, checkpoint_step=4)]
    parsed = shown(make_run(events=events))
    assert parsed.titles() == [
        "Loss",
        "Gradient norm (before clipping)",
        "Learning rate",
        "Throughput",
        "Model FLOPs utilization",
        "Step time",
        "Peak memory per rank",
        "Goodput up to each step",
        "Wall time by cause",
    ]
    assert parsed.titles("h2") == [
        *("Training", "Throughput and memory", "Goodput", "Timeline", "Config"),
    ]
    for text in ("llama3 tiny", "4 of 4", "7.6000", "6.5000", "80.0%", "16.4 k", "a small run"):
        assert text in re.sub(r"\s+", " ", parsed.text), text
    loss = parsed.figures["figure-0"]["data"]
    assert [one["name"] for one in loss] == ["training", "validation"]
    assert (loss[0]["x"], loss[0]["y"]) == ([1, 2, 3, 4], [7.9, 7.8, 7.7, 7.6])
    assert (loss[1]["x"], loss[1]["y"]) == ([4], [6.5])
    # Each figure has its placeholder.
    places = {attrs.get("id") for tag, attrs in parsed.tags if tag == "div"}
    assert parsed.figures.keys() <= places


def test_the_page_needs_no_network(make_run):
    parsed = shown(make_run(), make_run("other"))
    loading = {"src", "href", "srcset", "data", "action", "poster"}
    for tag, attrs in parsed.tags:
        assert tag not in {"link", "iframe", "object", "img", "base"}
        for name in loading & attrs.keys():
            assert (attrs[name] or "").startswith("#"), (tag, attrs)
    (policy,) = [attrs["content"] or "" for _, attrs in parsed.tags if "http-equiv" in attrs]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy and "unsafe-eval" not in policy
    assert "@import" not in parsed.source and "url(" not in parsed.source.partition("</style>")[0]
    assert len(parsed.scripts) == 3 and "plotly.js" in parsed.scripts[1][:500]


def test_text_of_files_is_escaped(make_run, tmp_path):
    config = CONFIG + f'\n[extra]\ntext = "{ATTACK}"\n"<b>key</b>" = 1\n'
    config = config.replace('"a small run"', f'"{ATTACK}"').replace('"tiny"', f'"{ATTACK}"')
    folder = make_run("<b>run<", config=config, events=[event(ATTACK, 4, 15.0, reason=ATTACK)])
    other = make_run("other")
    write_metrics(
        other / "metrics.jsonl",
        [record(1, router_load={ATTACK: 1.5}), event("error", 1, 12.0, reason=f"]]>--> {ATTACK}")],
    )
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "loss": ATTACK}) + "\n")
    parsed = shown(folder, other)
    plain = shown(make_run("plain"), make_run("plain2"))
    assert ATTACK in parsed.text
    assert [tag for tag, _ in parsed.tags].count("script") == len(plain.scripts) == 3
    assert {tag for tag, _ in parsed.tags} <= {tag for tag, _ in plain.tags} | {"details", "br"}
    assert not any(name.startswith("on") for _, attrs in parsed.tags for name in attrs)
    # plotly.js reads tags in the labels of figures.
    assert "<" not in parsed.scripts[0]
    text = json.dumps(parsed.figures).replace("<br>", "").replace("<b>", "").replace("</b>", "")
    assert "<" not in re.sub(r"</?extra>", "", text)


def test_replicas(replicas):
    parsed = shown(replicas)
    assert {"Participating replicas", "Recoveries"} <= set(parsed.titles())
    assert {"fault", "healed", "aborted step", "starting", "training", "down"} <= set(
        traces(parsed)
    )
    assert {"replica 0", "replica 1", "replica 1, rank 1"} <= set(traces(parsed))
    assert "killed by SIGKILL" in parsed.text and "connection <b>closed</b>" in parsed.text
    assert "2 x 2" in parsed.text


def labels(figure):
    """Return the labels of the buttons above a figure."""
    menus = figure["layout"].get("updatemenus", [{"buttons": []}])
    return [button["label"] for button in menus[0]["buttons"]]


def test_losses_are_drawn_over_steps_tokens_or_time(make_run):
    changes = {step: {"tokens": 100 * step, "time": 50.0 + 2 * step} for step in range(1, 5)}
    changes[1] |= {"step_time_s": 3.0}
    events = [event("validation", 4, 60.0, loss=4.5)]
    runs = [make_run("a", changes=changes, events=events), make_run("b", steps=2)]
    figures = [one for one in shown(*runs).figures.values() if "Tokens" in labels(one)]
    # Loss, gradient norm and learning rate.
    assert len(figures) == 3
    for figure in figures:
        by_label = {
            button["label"]: button["args"]
            for button in figure["layout"]["updatemenus"][0]["buttons"]
        }
        assert list(by_label) == ["Steps", "Tokens", "Time"]
        assert by_label["Steps"][0]["x"] == [trace["x"] for trace in figure["data"]]
        assert by_label["Tokens"][0]["x"][0] == [100, 200, 300, 400]
        assert by_label["Time"][0]["x"][0] == [3.0, 5.0, 7.0, 9.0]
        assert by_label["Tokens"][1]["xaxis.title.text"] == "tokens"
    (validation,) = [trace for trace in figures[0]["data"] if "validation" in trace["name"]]
    place = figures[0]["data"].index(validation)
    menu = figures[0]["layout"]["updatemenus"][0]["buttons"]
    assert [button["args"][0]["x"][place] for button in menu] == [[4], [400], [9.0]]


def test_an_axis_that_a_run_lacks_is_not_offered(make_run):
    without = {step: {"tokens": None} for step in range(1, 5)}
    runs = [make_run("a"), make_run("b", changes=without)]
    found = {tuple(labels(one)) for one in shown(*runs).figures.values()}
    assert ("Steps", "Time") in found and not any("Tokens" in one for one in found)


def test_the_timeline_has_both_axes(replicas):
    (figure,) = [one for one in shown(replicas).figures.values() if "Wall time" in labels(one)]
    buttons = figure["layout"]["updatemenus"][0]["buttons"]
    assert [one["label"] for one in buttons] == ["Wall time", "Steps"]
    for one in buttons:
        changes = one["args"][0]
        assert len(changes["x"]) == len(changes["base"]) == len(figure["data"])
        for x, trace in zip(changes["x"], figure["data"], strict=True):
            assert len(x) == len(trace["y"])


def test_router_load_and_idle_experts(make_run):
    changes = {
        step: {"router_load": {"layers.0": 1.0 + step, "layers.1": 2.0}, "idle_experts": 3 - step}
        for step in (1, 2, 3)
    }
    parsed = shown(make_run(steps=3, changes=changes))
    assert parsed.titles("h2")[-2] == "Router load"
    assert {"Router load", "Idle experts"} <= set(parsed.titles())
    named = {one["name"]: one for figure in parsed.figures.values() for one in figure["data"]}
    assert named["layers.0"]["y"] == [2.0, 3.0, 4.0]
    assert "Router load" not in shown(make_run("dense")).titles("h2")


def test_many_routers_are_a_heatmap(make_run):
    load = {f"layers.{place}": 1.5 for place in range(20)}
    parsed = shown(make_run(changes={step: {"router_load": load} for step in range(1, 5)}))
    (heatmap,) = [
        one
        for figure in parsed.figures.values()
        for one in figure["data"]
        if one["type"] == "heatmap"
    ]
    assert len(heatmap["z"]) == 20 and heatmap["x"] == [1, 2, 3, 4]


def test_several_runs_are_overlaid_and_compared(make_run):
    other = CONFIG.replace("0.001", "0.002")
    parsed = shown(make_run("a"), make_run("b", changes={3: {"loss": 5.0}}, config=other))
    assert parsed.titles("h2")[0] == "Comparison"
    assert [one["name"] for one in parsed.figures["figure-1"]["data"]] == ["a", "b"]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", parsed.source)
    assert "step 3" in cells and "7.7 and 5, relative 0.351" in cells
    assert "equal at all 4 common steps" in cells
    place = cells.index("optimizer.lr")
    assert cells[place + 1 : place + 3] == ["0.001", "0.002"]


def test_values_that_are_not_finite(make_run):
    changes = {2: {"loss": float("nan"), "grad_norm": float("inf")}}
    parsed = shown(make_run("a", changes=changes), make_run("b"))
    assert "not finite and 7.8" in parsed.text
    assert "NaN" not in parsed.scripts[0] and "Infinity" not in parsed.scripts[0]


def test_records_of_earlier_versions(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.5}\n{"event": "validation", "step": 1, "loss": 3.5}\n'
    )
    parsed = shown(tmp_path)
    assert parsed.titles() == ["Loss"]
    assert not any("updatemenus" in one["layout"] for one in parsed.figures.values())


def test_problems_are_listed(make_run):
    folder = make_run()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("<what>\n")
    parsed = shown(folder)
    assert "1 problem in the files" in parsed.text and "metrics.jsonl:5: " in parsed.text


def test_long_curves_keep_their_spikes():
    points: list[tuple[int, float | None]] = [(step, 1.0) for step in range(100_000)]
    points[54_321] = (54_321, 99.0)
    points[60_000] = (60_000, None)
    kept = downsample(points)
    assert len(kept) <= 3001
    assert (54_321, 99.0) in kept and (60_000, None) in kept
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(41.24, "41.2 s"), (723, "12 min 03 s"), (18720, "5 h 12 min"), (190_000, "2 d 4 h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_a_report_is_the_same_for_the_same_files(make_run):
    folder = make_run()
    assert shown(folder).source == shown(folder).source


def test_nothing_heavy_is_imported():
    code = (
        "import sys, torchtitan_lite.cli.report\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'plotly', 'rich'} & sys.modules.keys()\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
