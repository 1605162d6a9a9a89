"""The pages in a real browser: they load without errors and without the network, show the data, and can be used."""

import json
import time

import pytest
from support import browser as browsers
from support.bench_figures import MACHINE, result
from typer.testing import CliRunner

from mkernel import cli, demo, report
from mkernel.bench import page as bench_page
from mkernel.demo import page as demo_page

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def browser():
    with browsers.opened() as opened:
        yield opened


RESULTS = [
    result() | {"shape": [16384, 2048, 8192]},
    result(
        shape=(8192, 512, 8192), fused_ms=0.9, floor_fraction=0.71, nccl_ms=1.6, symm_mem_ms=1.4, symm_mem_speedup=1.56
    )
    | {"symm_mem_status": "measured", "symm_mem_way": "fused_all_gather_matmul"}
    | {"shape": [8192, 512, 8192], "published_size": 8192, "published_ms": 0.741, "published_floor_fraction": 0.31},
    result("matmul_reduce_scatter", (4096, 4096, 4096), emulated=False, ranks=2, gpus=2) | {"shape": [4096] * 3},
    result("matmul_reduce_scatter", (2048, 2048, 2048)) | {"shape": [2048] * 3},
    result("matmul_reduce_scatter", (64, 64, 64), max_error=float("inf")) | {"shape": [64] * 3},
    {"op": "matmul_reduce_scatter", "failed": "rank 0 <b>waited</b> </script>", "shape": [64, 64, 128]},
]


@pytest.fixture(scope="module")
def bench_report(tmp_path_factory, browser):
    path = tmp_path_factory.mktemp("pages") / "bench.html"
    path.write_text(bench_page.page({"machine": MACHINE, "results": RESULTS}))
    browser.get(path.as_uri())
    return browser


def test_a_report_loads_without_errors_and_without_the_network(bench_report):
    assert browsers.messages(bench_report) == []
    assert browsers.requested(bench_report) == []
    assert bench_report.title == "mkernel bench"
    words = bench_report.find_element("tag name", "body").text
    for expected in (
        "Emulated figures",
        "16384x2048x8192, 1x4 ranks, emulated",
        "4096x4096x4096, 1x2 ranks",
        "2048x2048x2048, 1x4 ranks, emulated",
        "8192x512x8192: symm_mem: fused_all_gather_matmul takes 1.56 times the fused time",
        "against symmetric memory",
        "64x64x64: WRONG RESULT",
        "64x64x128 failed: rank 0 <b>waited</b> </script>",
        "UC Berkeley",
    ):
        assert expected in words
    assert "1x2 ranks, emulated" not in words


def data_of(browser):
    return json.loads(browser.execute_script("return document.getElementById('data').textContent"))


def plotted(browser, plot):
    """name -> y, as the browser has drawn them."""
    script = """
        const plot = [...document.querySelectorAll(".plot")].find(one => one.dataset.plot === arguments[0]);
        return plot.data.map(trace => [trace.name, Array.from(trace.y)])"""
    return dict(browser.execute_script(script, plot))


def test_plots_have_the_data_of_the_json(bench_report):
    figures = data_of(bench_report)
    assert figures["machine"] == MACHINE
    assert len(figures["results"]) == len(RESULTS)
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        measured = [one for one in figures["results"] if one["op"] == op and "failed" not in one]
        bars = plotted(bench_report, f"{op}-times")
        for key, name in bench_page.BARS.items():
            values = [one.get(key) for one in measured]
            assert bars.get(name) == (values if any(values) else None)
        points = plotted(bench_report, f"{op}-floor")
        assert points["in bursts"] == [one["floor_fraction"] for one in measured]
        drawn = bench_report.execute_script(
            "return [...document.querySelectorAll(`[data-plot=${arguments[0]}] .bars .point path`)]"
            ".filter(bar => bar.getBBox().height > 0).length",
            f"{op}-times",
        )
        assert drawn == sum(len([value for value in values if value is not None]) for values in bars.values())
    assert plotted(bench_report, "all_gather_matmul-floor")["published mKernel, 2 x 8 H200"] == [None, 0.31]


def place_of(browser, selector):
    """Where the middle of an element is, in the window, after it was scrolled into view."""
    return browser.execute_script(
        "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
        "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2, r.width, r.height]",
        selector,
    )


def mouse(browser, *places, drag=False):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.actions.action_builder import ActionBuilder

    actions = ActionBuilder(browser, duration=100)
    pointer = actions.pointer_action
    pointer.move_to_location(*map(int, places[0]))
    if drag:
        pointer.pointer_down()
    for place in places[1:]:
        pointer.move_to_location(*map(int, place))
    if drag:
        pointer.pointer_up()
    actions.perform()
    ActionChains(browser).pause(0.5).perform()


def test_hover_shows_the_figure(bench_report):
    x, y, _, _ = place_of(bench_report, "[data-plot=all_gather_matmul-times] .bars .point path")
    mouse(bench_report, (x - 3, y - 3), (x, y))
    shown = bench_report.execute_script(
        "return document.querySelector('[data-plot=all_gather_matmul-times] .hoverlayer').textContent"
    )
    assert "fused" in shown
    assert "3" in shown


def test_a_drag_zooms_and_a_double_click_returns(bench_report):
    def span():
        return bench_report.execute_script(
            "const axis = document.querySelector('[data-plot=all_gather_matmul-times]').layout.yaxis; return axis.range"
        )

    before = span()
    x, y, width, height = place_of(bench_report, "[data-plot=all_gather_matmul-times] .nsewdrag")
    mouse(bench_report, (x - width / 4, y - height / 4), (x, y), (x + width / 4, y + height / 4), drag=True)
    zoomed = span()
    assert zoomed[1] - zoomed[0] < 0.7 * (before[1] - before[0])
    from selenium.webdriver.common.action_chains import ActionChains

    area = bench_report.find_element("css selector", "[data-plot=all_gather_matmul-times] .nsewdrag")
    ActionChains(bench_report).double_click(area).pause(0.7).perform()
    deadline = time.monotonic() + 10  # the page animates it, and the machine may be busy
    while span() != pytest.approx(before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert span() == pytest.approx(before)
    assert browsers.messages(bench_report) == []


def test_no_button_sends_anything_anywhere(bench_report):
    titles = bench_report.execute_script(
        "return [...document.querySelectorAll('.modebar-btn')].map(button => button.dataset.title)"
    )
    assert "Zoom" in titles
    assert not [title for title in titles if "share" in title.lower() or "cloud" in title.lower()]


def test_nothing_is_wider_than_a_laptop(bench_report):
    wide, window = bench_report.execute_script("return [document.body.scrollWidth, window.innerWidth]")
    assert wide <= window


def test_the_page_of_the_demo(tmp_path, browser):
    checks = [demo.Check((8, 4), 0.1, 0.5), demo.Check((8, 4), float("nan"), float("nan"))]
    one = demo.Shown(
        "all_gather_matmul", "gathers", "rows & <columns>", checks, ["rank 1: error nan"], nvlink=[[0, 64], [32, 0]],
        network=[[0, 0], [0, 0]], products=[[8, 8], [8, 8]], before_last_arrival=[[5, 6], [1, 2]],
    )  # fmt: skip
    path = tmp_path / "demo.html"
    path.write_text(demo_page.page("2 ranks", True, [one]))
    browser.get(path.as_uri())
    assert browsers.messages(browser) == []
    assert browsers.requested(browser) == []
    shown = data_of(browser)["operators"][0]
    drawn = browser.execute_script(
        "return document.querySelector('[data-plot=all_gather_matmul-nvlink]').data[0].z.map(row => Array.from(row))"
    )
    assert drawn == shown["nvlink_bytes"] == [[0, 64], [32, 0]]
    assert plotted(browser, "all_gather_matmul-overlap") == {
        "before the rank's last byte arrived": [5, 6],
        "after": [3, 2],
    }
    assert shown["ranks"][1]["error"] is None
    words = browser.find_element("tag name", "body").text
    assert "Wrong: all_gather_matmul: rank 1: error nan" in words
    assert "rows & <columns>" in words
    assert not browser.find_elements("css selector", "[data-plot=all_gather_matmul-network]")  # nothing was sent there


def test_json_in_a_page_can_not_end_its_script():
    text = report.plot("p", [{"x": ["</script><script>alert(1)</script>", float("nan")]}], "t", "x", "y")
    assert text.count("</script>") == 1
    assert "NaN" not in text


def test_json_in_a_page_has_no_character_of_markup():
    value = {"<!--<script>": ["</script>", "&amp;", "]]>", "\u2028\u2029"]}
    text = report.to_json(value)
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == value


# -- names that are no markup, whatever is in them


def drawn_texts(browser):
    """Every text in the plots; a line of its own for each line that is drawn."""
    return "\n".join(browsers.texts(browser, ".plot svg text"))


def spaces(text):
    """SVG shows any space as a blank."""
    return "".join(" " if one in "\u2028\u2029\n\xa0" else one for one in text)


@pytest.mark.parametrize("name", browsers.HOSTILE)
def test_hostile_names_in_a_report(tmp_path, browser, name):
    trace = {"type": "bar", "name": name, "x": [name, "b"], "y": [1, 2]}
    other = trace | {"name": "other", "y": [2, 3]}
    parts = [
        report.text(name, name),
        report.heading(name),
        report.table([name], [[name]]),
        report.plot(name, [trace, other], name, name, name),
        report.plot(name, [other], "second plot", "", ""),  # of the same name
    ]
    path = tmp_path / "page.html"
    path.write_text(report.page(name, parts, {name: name}), encoding="utf-8")
    browser.get(path.as_uri())
    browsers.check_nothing_ran(browser)
    assert data_of(browser) == {name: name}
    for selector in ("h1", "h2", "p:not(.small)", "th", "td"):
        assert browsers.texts(browser, selector)[0] == name
    assert spaces(browser.title) == spaces(" ".join(name.split(" ")))
    plots = browser.execute_script("return [...document.querySelectorAll('.plot')].map(one => one.data.length)")
    assert plots == [2, 1]
    drawn = spaces(drawn_texts(browser))
    assert drawn.count(spaces(name)) >= 5  # title, two axes, a tick and the legend


@pytest.mark.parametrize("name", browsers.HOSTILE)
def test_hostile_names_in_the_report_of_a_benchmark(tmp_path, browser, name):
    measured = [result() | {"op": name, "shape": [name, 8]}, result() | {"op": name, "shape": [9, 9]}]
    results = [*measured, {"op": name, "shape": [name], "failed": name}, result() | {"shape": [64] * 3}]
    path = tmp_path / "bench.html"
    figures = {"machine": MACHINE | {"gpu": name}, "results": results}
    path.write_text(bench_page.page(figures), encoding="utf-8")
    browser.get(path.as_uri())
    browsers.check_nothing_ran(browser)
    assert data_of(browser)["results"][0]["op"] == name
    assert browsers.texts(browser, "h2")[0] == name
    assert f"{name} failed: {name}" in browsers.texts(browser, "p.wrong")
    assert browsers.texts(browser, "td")[0].startswith(f"{name}x8, 1x4 ranks")
    assert len(browser.find_elements("css selector", ".plot .main-svg")) > 0
    assert spaces(f"{name}x8") in spaces(drawn_texts(browser))
    ticks = browsers.texts(browser, ".plot .xtick text")
    assert "9x91x4 ranks, emulated" in ticks  # two lines, one below the other


@pytest.mark.parametrize("name", browsers.HOSTILE)
def test_hostile_names_on_the_page_of_the_demo(tmp_path, browser, name):
    one = demo.Shown(
        name, f"gathers {name}", name, [demo.Check((8, 4), 0.1, 0.5)] * 2, [name], nvlink=[[0, 64], [32, 0]],
        network=[[0, 0], [0, 0]], products=[[8, 8], [8, 8]], before_last_arrival=[[5, 6], [1, 2]],
        times={name: 1.0, "other": 2.0},
    )  # fmt: skip
    path = tmp_path / "demo.html"
    path.write_text(demo_page.page(name, True, [one]), encoding="utf-8")
    browser.get(path.as_uri())
    browsers.check_nothing_ran(browser)
    assert browsers.texts(browser, "h2") == [name]
    assert f"Wrong: {name}: {name}" in browsers.texts(browser, "p.wrong")
    assert spaces(name) in spaces(drawn_texts(browser))


def test_a_plan_loads_without_errors_and_without_the_network(browser, tmp_path):
    path = tmp_path / "plan.html"
    options = ["matmul_reduce_scatter", "65536x8192x32768", "--nodes", "2,4", "--html", str(path)]
    assert CliRunner().invoke(cli.main, ["plan", *options]).exit_code == 0
    browser.get(path.as_uri())
    assert browsers.messages(browser) == []
    assert browsers.requested(browser) == []
    results = data_of(browser)["results"]
    assert plotted(browser, "times")["fused"] == [one["fused_ms"] for one in results]
    assert set(plotted(browser, "timeline-4")) >= {"multiply"}
    assert "All figures are modelled" in browser.find_element("tag name", "body").text
