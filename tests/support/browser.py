"""A real browser for tests of pages: Debian's chromium, without a window, driven by its ChromeDriver.

Where there is no chromium, or no selenium, tests that want one are skipped, and say so.
"""

import contextlib
import shutil
import tempfile

import pytest

from support.patience import HANG

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1366,768",  # a laptop
)

# names that would run a script, or break the page, if they were taken for markup
RAN = "window.ran = (window.ran || 0) + 1"
_HOSTILE = [
    f"</script><script>{RAN}</script>",
    f"</ScRiPt ><script>{RAN}</script>",
    f"<!--<script>{RAN}",
    f"--><script>{RAN}</script>",
    f"\"><img src=x onerror='{RAN}'>",
    f"' onmouseover='{RAN}' \"",
    "]]> &lt;b&gt; <b>bold</b> <br> \\u003c \\",
    f"');{RAN};('",
    "line\u2028sepa\u2029rators",
    f'<a href="javascript:{RAN}">link</a>',
    "data",
]
# each alone takes a page of its own, which takes seconds; a comment would hide the names behind it
_OTHERS = " ".join(name for name in _HOSTILE[1:] if "<!--" not in name)
HOSTILE = [_HOSTILE[0], *(pytest.param(name, marks=pytest.mark.thorough) for name in (_HOSTILE[2], _OTHERS))]


@contextlib.contextmanager
def opened():
    """The browser, with a profile of its own."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("there is no chromium and chromedriver (Debian: apt install chromium chromium-driver)")
    with tempfile.TemporaryDirectory(prefix="mkernel-browser-") as profile:
        options = selenium.ChromeOptions()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        browser = selenium.Chrome(options=options, service=selenium.ChromeService(executable_path=driver))
        try:
            browser.set_page_load_timeout(HANG)
            browser.set_script_timeout(HANG)
            yield browser
        finally:
            browser.quit()


def messages(browser):
    """What the page wrote to the console, errors of its scripts among it."""
    return [entry["message"] for entry in browser.get_log("browser")]


def requested(browser):
    """Every address that the page asked for, other than itself and what it has inside."""
    import json

    events = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    addresses = [
        event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
    ]
    return [address for address in addresses if not address.startswith(("file:", "data:", "blob:", "chrome:"))]


def texts(browser, selector):
    """What the elements say, character by character."""
    script = "return [...document.querySelectorAll(arguments[0])].map(one => one.textContent)"
    return browser.execute_script(script, selector)


def check_nothing_ran(browser):
    """None of the HOSTILE names on the page was taken for markup."""
    import json

    assert messages(browser) == []
    assert requested(browser) == []
    assert browser.execute_script("return window.ran || 0") == 0
    tags = "img, a[href^=javascript], [onerror], [onmouseover]"
    assert browser.find_elements("css selector", tags) == []
    json.loads(browser.execute_script("return document.getElementById('data').textContent"))  # can still be read
