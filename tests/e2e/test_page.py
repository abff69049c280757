"""The pages at `/` and `/docs` in a real browser. With keys: test_with_keys.py; generation: test_generation.py."""

import re

import pytest
from chromium import WAIT_S, browser

from tests.kit.service import wait_until

NOTE_POOLS = """
window.seen = [];
new MutationObserver(() => seen.push(document.getElementById("pools").innerText))
  .observe(document.getElementById("pools"), { childList: true, subtree: true }); 0
"""
NO_LABEL = "[...document.querySelectorAll('input,select,textarea')].filter((one) => !one.labels.length).length"


@pytest.fixture(scope="module")
def tab():
    with browser() as tab:
        yield tab


@pytest.fixture
def page(rehearsal, tab):
    tab.asked.clear(), tab.complaints.clear()
    tab.open(f"{rehearsal.address}/")
    tab.wait_for("#pools", "CPU")
    yield tab
    assert {url for url in tab.asked if not url.startswith((f"{rehearsal.address}/", "data:"))} == set()
    assert tab.complaints == []


def test_a_burst_fills_the_accelerator_then_the_cpu_and_the_rest_is_refused(rehearsal, page):
    page.run(NOTE_POOLS)

    def has_been_full():
        """Seldom the browser has no turn while the devices run: then another burst follows."""
        rehearsal.wait_until_idle()
        page.wait_for("#pools", "CPU: 0 % full; 0 in flight, 0 of them wait; room for 5 more")
        page.click("#burst")
        found = page.wait_for("#burst-said", "texts at once")
        assert found.startswith(
            "38 texts at once: the accelerator answered 20, the CPU answered 5, 13 were refused. The slowest answer"
        )
        assert found.endswith("promised: 12 s.")
        seen = page.run("seen.splice(0)")
        return any("accelerator: 100 % full; 20 in flight" in one and "CPU: 100 % full; 5" in one for one in seen)

    wait_until(has_been_full, "full pools on the page", WAIT_S)

    def has_counted():
        """What both Routers have, whichever sent the burst."""
        answered, overflow, busy, _ = map(int, re.findall(r"\d+", page.text("#totals")))
        return answered >= 20 and overflow >= 5 and busy >= 13 and page.run("document.getElementById('several').hidden")

    wait_until(has_counted, "the totals of both Routers", WAIT_S)
    assert page.run("document.querySelectorAll('#recent rect.accelerator, #recent rect.cpu').length") >= 2
    assert page.run("document.querySelectorAll('#finish circle').length") >= 10
    assert page.run("document.getElementById('recent').getAttribute('aria-label')").startswith("In the last five")
    assert page.run(NO_LABEL) == 0


def test_texts_are_embedded_and_the_pool_is_named(rehearsal, page):
    rehearsal.wait_until_idle()
    page.write("#text", "Where does the overflow go?\n\nTo the CPU.")
    page.click("#go")
    said = page.wait_for("#said", "Answered by")
    assert re.match(r"Answered by the (accelerator|CPU) in ", said)
    assert said.count("384 numbers") == 2
    assert "cosine to the first" in said
    page.write("#text", " ")
    page.click("#go")
    page.wait_for("#said", "input")  # the service's own sentence
    page.complaints.clear()  # the browser notes each answer 4xx


def test_it_is_drawn_in_light_and_in_dark(page):
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = [(page.picture(dark=dark)[:4], page.run(ground)) for dark in (False, True)]
    assert seen == [(b"\x89PNG", "rgb(255, 255, 255)"), (b"\x89PNG", "rgb(13, 17, 23)")]


def test_the_routes_are_shown_without_the_internet(rehearsal, page):
    page.open(f"{rehearsal.address}/docs")
    page.wait_for(".swagger-ui", "/v1/embeddings")
