"""The report of a study, in a browser too, and its files."""

import csv
import html
import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from studying import QUICK, read, results_in

from keepgrad.study import findings, run
from keepgrad.study.config import StudyConfig
from keepgrad.study.questions import FULL, key_of, name_of
from keepgrad.study.results import mean_and_error

# The report


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.ids, self.found, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_the_report_needs_nothing_from_elsewhere(finished):
    text = (finished / "report.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert "script" not in tags.found
    assert "link" not in tags.found
    assert all(link.startswith(("data:", "#")) for link in tags.links)
    assert not re.search(r"url\((?!#)|@import", text)
    assert len(tags.ids) == len(set(tags.ids))
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(tags.ids)
    assert tags.found.count("img") == 6
    assert tags.found.count("svg") == 1 + 2 * 6 + 1
    assert "#0a0b0c" not in text


def test_the_report_says_what_was_found(finished):
    text = (finished / "report.html").read_text()
    results = read(finished)
    headline = text[text.index('class="headline"') : text.index("</section>")]
    assert html.escape(findings.code_of(findings.advice(results).best)) in headline
    for title in ("Which positions?", "How many positions?", "Which layers, at equal memory?", "How is attention"):
        assert title in text


def test_tables_and_pictures_are_files_too(finished):
    with (finished / "study.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    results = read(finished)
    assert [row["setting"] for row in rows] == [FULL, *map(name_of, results.measured)]
    one = next(row for row in rows if row["setting"] == "fold 0.25")
    key = key_of({"keep_ratio": 0.25})
    assert float(one["cosine"]) == pytest.approx(results.measured[key].cosine, abs=1e-6)
    assert json.loads(one["options"]) == {"keep_ratio": 0.25}
    assert float(one["top1"]) == pytest.approx(mean_and_error(results.top1(key))[0], abs=1e-6)
    with (finished / "layers.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == sum(len(one.layers) for one in results.measured.values())
    names = {"pareto", "mask", "reduce", "ratio", "schedule", "attention", "layers", "mask-grid-0.5"}
    assert names <= {path.stem for path in finished.glob("*.png")}


def test_a_study_without_training_shows_the_norm_instead(finished, tmp_path):
    for name in ("results.json", "start.safetensors"):
        shutil.copy(finished / name, tmp_path)
    run.study(StudyConfig(**{**QUICK, "train": 0, "resume": True, "output": str(tmp_path)}), tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert 'id="mask-norm_ratio-' in text
    assert 'id="mask-top1-' not in text
    assert "short trainings" not in text
    assert results_in(tmp_path)["trained"] == results_in(finished)["trained"]


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-background-networking", "disable-sync"):
        options.add_argument(f"--{argument}")
    found = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield found
    found.quit()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (390, 844)], ids=["laptop", "phone"])
def test_the_report_in_a_browser(finished, browser, size, scheme):
    width, height = size
    shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)
    preference = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [preference]})
    browser.get((finished / "report.html").as_uri())
    look = browser.execute_script(
        """
        const boxes = [...document.querySelectorAll("svg, img")].map(e => e.getBoundingClientRect());
        const ink = document.querySelector("svg text");
        return {
            wide: document.documentElement.scrollWidth,
            least: Math.min(...boxes.map(b => b.width)),
            right: Math.max(...boxes.map(b => b.right)),
            columns: new Set([...document.querySelectorAll(".figures")][1].children.length
                ? [...[...document.querySelectorAll(".figures")][1].children].map(e => e.getBoundingClientRect().top)
                : []).size,
            paper: getComputedStyle(document.body).backgroundColor,
            ink: getComputedStyle(ink).fill,
            loaded: [...document.images].every(i => i.complete && i.naturalWidth > 0),
            outside: performance.getEntriesByType("resource").filter(e => e.name.startsWith("http")).length,
        };
        """
    )
    assert look["wide"] <= width
    assert look["right"] <= width
    assert look["least"] > 80
    assert look["columns"] == (1 if width > 500 else 2)  # rows that the two figures of a question take
    assert look["loaded"]
    assert look["outside"] == 0
    bright = {"paper": sum(map(int, re.findall(r"\d+", look["paper"])[:3]))}
    bright["ink"] = sum(map(int, re.findall(r"\d+", look["ink"])[:3]))
    assert (bright["paper"] > bright["ink"] + 300) == (scheme == "light")
    assert abs(bright["paper"] - bright["ink"]) > 300
