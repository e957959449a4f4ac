"""report writes one HTML page: its data here, the page itself in headless Chromium, if Playwright is installed."""

import base64
import gzip
import json
import re
import shutil

import jax
import jax.numpy as jnp
import pytest

import mlax
from mlax import inspect, nn, optim, train

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
BLOCK = mlax.Residual(mlax.Series(norm=nn.LayerNorm(), fc=nn.Linear(32)))
MODEL = mlax.Series(up=nn.Linear(32), blocks=mlax.Repeat(BLOCK, 3, mode="scan"), head=nn.Linear(4))


def data_of(path):
    text = re.search(r'<script id="data" type="application/json">(.*?)</script>', path.read_text(), re.S)[1]
    return json.loads(text)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return inspect.report(tmp_path_factory.mktemp("report") / "report.html", MODEL, X)


def test_a_report_of_a_model_has_its_layers_costs_memory_and_stages(page):
    data, rows = data_of(page), inspect.summary(MODEL, X).rows
    layers = {layer["path"]: layer for layer in data["layers"]}
    assert list(layers) == [row.path for row in rows]
    for row in rows:
        assert layers[row.path]["parameters"] == row.parameters and layers[row.path]["output"] == row.output
    counted = sum(layer["own"].get("forward", 0) for layer in data["layers"])
    assert counted == rows[0].forward_flops
    assert data["memory"]["total"] > rows[0].bytes
    assert any(path == "blocks/stacked/layer/fc" for path, *_ in data["operations"])
    jaxpr = gzip.decompress(base64.b64decode(data["stages"]["jaxpr"])).decode()
    assert "dot_general" in jaxpr
    assert "http" not in page.read_text().replace("http://www.w3.org/2000/svg", "")  # nothing is loaded


def test_a_report_of_a_step_and_of_a_plain_function_has_paths_where_there_are_names(tmp_path):
    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        y, new = MODEL.fwd(batch["x"], trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return jnp.square(y).mean(-1), new

    step = train.step(objective, optim.SGD(0.1))
    state = step.init(jax.random.key(0), *MODEL.init(jax.random.key(1), X))
    data = data_of(inspect.report(tmp_path / "step.html", step, state, {"x": jnp.ones(X.shape)}))
    layers = {layer["path"]: layer for layer in data["layers"]}
    assert layers[""]["parameters"] == mlax.count(state.trainables)
    assert layers["up"]["parameters"] == 16 * 32 + 32 and layers["up"]["dtype"] == "float32"
    data = data_of(inspect.report(tmp_path / "plain.html", lambda x: jnp.tanh(x @ x.T), X))
    assert [layer["path"] for layer in data["layers"]] == [""] and data["layers"][0]["own"]["forward"] == 2 * 8 * 8 * 16


def browser_pages(page, **options):
    sync = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width, scheme in ((1280, "light"), (390, "light"), (1280, "dark")):
            tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            errors = []
            tab.on("console", lambda message, errors=errors: message.type == "error" and errors.append(message.text))
            tab.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
            tab.goto(page.as_uri())
            tab.wait_for_selector("#stage .n")
            yield tab, width, errors
        browser.close()


def test_the_page_folds_sorts_and_searches_without_errors_at_any_width(page):
    for tab, width, errors in browser_pages(page):
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        rows = tab.locator("#layers tbody tr")
        unfolded = rows.count()
        tab.click("#fold")
        assert rows.count() < unfolded
        tab.click("#unfold")
        tab.click("#layers th button:text-is('parameters')")
        assert rows.nth(1).get_attribute("data-path") == "blocks"  # the largest part first
        tab.fill("#find-layer", "norm")
        assert "norm" in rows.last.get_attribute("data-path")
        tab.fill("#find-layer", "")
        tab.click("tr[data-path='blocks/stacked/layer/fc']")
        assert "blocks/stacked/layer/fc" in tab.inner_text("#operations-title")
        assert "dot_general" in tab.inner_text("#operations")
        tab.click("#stage-tabs button:text-is('HLO')")
        tab.fill("#find-line", "dot")
        tab.wait_for_selector("#stage mark")
        assert tab.locator("#treemap rect.tile").count() >= 3 and tab.locator("#roofline circle").count() >= 3
        assert errors == []
