"""The page of a trace, in a real browser where there is one."""

import copy
import dataclasses
import itertools
import json
import re
import shutil
import subprocess

import pytest
import torch
from support import browser as browsers
from support.patience import HANG

import mkernel as mk
from mkernel.tracing import page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# What a person would do with the page; what comes of it goes into the title, where --dump-dom shows it.
TRIAL = """
<script>
  const found = {spans: spans.length, rows: data.rows.length, legend: legend.children.length,
                 lines: summary.rows.length, whole: view.slice()};
  const point = (kind, x, y, more) => canvas.dispatchEvent(new MouseEvent(kind, {clientX: x, clientY: y, ...more}));
  const tile = spans.findIndex(span => data.kinds[span[4]].name === "tile");
  const place = () => { const [a, b, w, h] = box(spans[tile]), at = canvas.getBoundingClientRect();
                        return [at.left + a + w / 2, at.top + b + h / 2]; };
  point("mousemove", ...place());
  found.tip = tip.textContent;
  found.shown = tip.style.display;
  document.getElementById("in").click();
  found.nearer = view[1] - view[0];
  canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: -100, ctrlKey: true, clientX: 600, clientY: 300}));
  found.nearest = view[1] - view[0];
  document.getElementById("fit").click();
  point("dblclick", ...place());
  point("mousemove", ...place());
  found.again = tip.textContent;
  legend.querySelectorAll("input").forEach(tick => tick.click());
  point("mousemove", ...place());
  found.hidden = tip.style.display;
  found.title = document.querySelector("h1").textContent;
  document.title = "RESULT" + JSON.stringify(found) + "END";
</script>
"""


@pytest.fixture(scope="module")
def trace():
    def on_rank(group):
        a, b = torch.ones(32, 32, dtype=torch.bfloat16), torch.ones(32, 64, dtype=torch.bfloat16)
        with mk.trace() as trace:
            mk.all_gather_matmul(a, b)
        return trace

    return mk.spawn(on_rank, nodes=2, gpus_per_node=1, device="cpu")[0]


def test_the_page_has_the_data_of_the_trace_and_needs_nothing_else(trace, tmp_path):
    trace.html(tmp_path / "trace.html")
    text = (tmp_path / "trace.html").read_text()
    assert not re.search(r"https?://|src=|href=|import\(|fetch\(", text)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1))
    kinds = [kind["name"] for kind in data["kinds"]]
    for name in ("tile", "push", "send", "post", "wait for arrived"):
        drawn = sorted((span[2], span[3], span[5], span[6]) for span in data["spans"] if kinds[span[4]] == name)
        events = sorted(
            (event.start, event.duration, event.peer, event.index) for event in trace.events if event.kind == name
        )
        assert drawn == events
    assert sum(kinds[span[4]] == "network" for span in data["spans"]) == len(trace.transfers)
    assert all(0 <= span[1] < data["rows"][span[0]]["bands"] for span in data["spans"])
    assert len({kind["color"] for kind in data["kinds"]}) == len(kinds)
    for sent, seen in data["arrivals"]:
        assert kinds[data["spans"][sent][4]] in ("push", "send")
        assert kinds[data["spans"][seen][4]] == "wait for arrived"


def test_transfers_that_overlap_have_rows_of_their_own(trace):
    for row in page._side_by_side(list(trace.transfers)):
        assert all(one.end <= other.start for one, other in itertools.pairwise(row))


@pytest.mark.skipif(CHROMIUM is None, reason="there is no browser here")
@pytest.mark.thorough
def test_in_a_browser(trace, tmp_path):
    trace.html(tmp_path / "trace.html")
    path = tmp_path / "trial.html"
    path.write_text((tmp_path / "trace.html").read_text().replace("</body>", TRIAL + "</body>"))
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--enable-logging=stderr", "--window-size=1200,800", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=HANG, check=True,
    )  # fmt: skip
    assert "Uncaught" not in done.stderr, done.stderr
    found = json.loads(re.search(r"RESULT(.*?)END", done.stdout).group(1))
    data = page.data_of(trace)
    assert (found["spans"], found["rows"]) == (len(data["spans"]), len(data["rows"]))
    assert found["lines"] == 1 + 2
    assert found["legend"] == len(data["kinds"])
    assert found["title"] == "mKernel trace: all_gather_matmul"
    assert found["shown"] == "block"
    for tip in (found["tip"], found["again"]):
        assert re.match(r"tile number \d+\nof rank \d\nrank \d, CTA \d.*, call 0 \(all_gather_matmul\)\n", tip)
    whole = found["whole"][1] - found["whole"][0]
    assert found["nearer"] == pytest.approx(whole / 2, rel=0.05)
    assert found["nearest"] < found["nearer"]
    assert found["hidden"] == "none"


@pytest.fixture(scope="module")
def browser():
    with browsers.opened() as opened:
        yield opened


@pytest.mark.parametrize("name", browsers.HOSTILE)
@pytest.mark.thorough
def test_hostile_names(trace, tmp_path, browser, name):
    hostile = copy.copy(trace)
    hostile.device = name
    hostile.events = tuple(
        dataclasses.replace(event, op=name, lane=name, kind=name if event.kind == "tile" else event.kind)
        if event.kind != "launch"
        else dataclasses.replace(event, op=name)
        for event in trace.events
    )
    hostile.html(tmp_path / "trace.html")
    browser.get((tmp_path / "trace.html").as_uri())
    browsers.check_nothing_ran(browser)
    assert browsers.texts(browser, "h1") == [f"mKernel trace: {name}"]
    assert any(name in text for text in browsers.texts(browser, "#about span"))
    assert name in browsers.texts(browser, "#legend label")
    assert browsers.texts(browser, "#summary td")[2] == name
    tile = "spans.findIndex(span => data.kinds[span[4]].name === arguments[0])"
    tip = browser.execute_script(f"tip.textContent = describe({tile}); return tip.textContent", name)
    assert tip.startswith(name)
    assert f"call 0 ({name})" in tip
    browsers.check_nothing_ran(browser)
