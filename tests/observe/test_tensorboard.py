"""The TensorBoard of a finished run, viewed with a browser."""

import json
import re
import shutil
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.models.training import make_trainer

pytestmark = pytest.mark.slow

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")

# All text and the sizes of all pictures of a page, also below shadow roots and in frames.
LOOK = """
const text = [], images = [];
function walk(node) {
  if (node.nodeType === Node.TEXT_NODE) { text.push(node.textContent); return; }
  const name = (node.tagName || '').toLowerCase();
  if (name === 'style' || name === 'script') return;
  if (name === 'img' && node.naturalWidth) images.push([node.naturalWidth, node.naturalHeight]);
  if (name === 'iframe') { try { walk(node.contentDocument); } catch (error) {} }
  if (node.shadowRoot) walk(node.shadowRoot);
  for (const child of node.childNodes) walk(child);
}
walk(document);
return {text: text.join(' ').replace(/\\s+/g, ' '), images: images};
"""


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Returns the workdir of a run on handwritten digits, with evaluations and a profile."""
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("tensorboard")
    digits = load_digits()
    x = (digits.images[..., None] / 16).astype(np.float32)
    batches = tf.data.Dataset.from_tensor_slices((x, digits.target)).batch(64)
    layers = [keras.Input((8, 8, 1)), keras.layers.Conv2D(8, 3, activation="relu")]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    trainer = make_trainer(
        model,
        folder,
        log_every=10,
        profile="40:50",
        hyperparameters={"data.name": "digits"},
        sample=lambda trainer: "def sample(): pass",
    )
    trainer.fit(batches, steps=100, validation_data=batches, eval_every=50)
    return folder


@pytest.fixture(scope="module")
def address(workdir):
    """Yields the address at which TensorBoard shows the run."""
    command = [sys.executable, "-m", "tensorboard.main", "--load_fast=false", "--port=0"]
    server = subprocess.Popen(
        [*command, f"--logdir={workdir}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for line in server.stdout:
            found = re.search(r"http://localhost:\d+/", line)
            if found:
                break
        else:
            pytest.fail("TensorBoard did not start")
        yield found[0]
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def browser():
    if not BROWSER or not DRIVER:
        pytest.skip("no chromium here: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--window-size=1600,1200")
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def wait_for(browser, wanted, seconds: float = 60.0) -> dict:
    """Returns the content of the page, once it satisfies a condition."""
    end = time.monotonic() + seconds
    while True:
        seen = browser.execute_script(LOOK)
        if wanted(seen):
            return seen
        if time.monotonic() > end:
            pytest.fail(f"not seen after {seconds} s: {seen['text'][:2000]} {seen['images']}")
        time.sleep(0.5)


def open_tab(browser, address: str, tab: str) -> None:
    browser.get("about:blank")  # changing only the fragment would not reload the page
    browser.get(f"{address}#{tab}")


def screenshot(browser, folder, name: str) -> None:
    time.sleep(1.0)  # the page may still be drawing
    (folder / "screenshots").mkdir(exist_ok=True)
    path = folder / "screenshots" / f"{name}.png"
    assert browser.save_screenshot(str(path))
    print(path)


def test_scalars_are_shown(browser, address, workdir):
    open_tab(browser, address, "timeseries")
    names = ("loss", "accuracy", "learning_rate", "grad_norm", "weight_norm", "goodput")
    wait_for(browser, lambda seen: all(name in seen["text"] for name in names))
    screenshot(browser, workdir, "scalars")


def test_images_with_label_and_prediction_are_shown(browser, address, workdir):
    open_tab(browser, address, "images")
    # 8 x 8 pixels, twelve times as large, with a strip for the caption.
    wait_for(browser, lambda seen: [96, 122] in seen["images"])
    screenshot(browser, workdir, "images")


def test_the_config_the_model_and_the_sample_are_shown_as_text(browser, address, workdir):
    open_tab(browser, address, "text")
    names = ("data.name", "digits", "conv2d", "sample")  # the third is folded up
    wait_for(browser, lambda seen: all(name in seen["text"] for name in names))
    open_tab(browser, address, "text&tagFilter=sample")
    wait_for(browser, lambda seen: "def sample(): pass" in seen["text"])
    screenshot(browser, workdir, "text")


def test_hyper_parameters_are_shown(browser, address, workdir):
    open_tab(browser, address, "hparams")
    accuracy = float(
        json.loads((workdir / "metrics.jsonl").read_text().split("\n")[-2])["accuracy"]
    )
    names = ("data.name", "Learning rate", "Optimizer", "Adam", f"{accuracy:.5g}"[:6])
    wait_for(browser, lambda seen: all(name in seen["text"] for name in names))
    screenshot(browser, workdir, "hparams")


def test_the_overview_page_of_the_profile_is_shown(browser, address, workdir):
    open_tab(browser, address, "profile")
    wait_for(browser, lambda seen: "Performance Summary" in seen["text"])
    screenshot(browser, workdir, "profile")
