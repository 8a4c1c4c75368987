"""The same weights give the same logits and gradients in keras.applications."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.models.strategies import relative
from tftpu import models
from tftpu.models.weights import files
from tftpu.models.weights.layouts import keras_applications

pytestmark = pytest.mark.parity
SIZE, CLASSES = 64, 7
PEERS = {
    "resnet50": ("ResNet50", {}),
    "convnext_tiny": ("ConvNeXtTiny", {"include_preprocessing": False}),
    "efficientnetv2_b0": ("EfficientNetV2B0", {"include_preprocessing": False}),
}


@pytest.fixture(scope="module")
def peers() -> dict[str, keras.Model]:
    """Models of keras.applications, with everything that starts as zeros or ones made random."""
    rng = np.random.default_rng(2)
    made = {}
    for name, (peer, options) in PEERS.items():
        keras.utils.set_random_seed(1)
        model = getattr(keras.applications, peer)(
            weights=None,
            input_shape=(SIZE, SIZE, 3),
            classes=CLASSES,
            classifier_activation=None,
            **options,
        )
        for variable in model.weights:
            if len(variable.shape) == 1:
                low, high = (0.5, 1.5) if "variance" in variable.path else (-0.1, 0.1)
                center = 1.0 if "gamma" in variable.path else 0.0
                variable.assign(center + rng.uniform(low, high, variable.shape))
        made[name] = model
    return made


def ours(name: str) -> keras.Model:
    fields = {"stride_in": "1x1"} if name == "resnet50" else {}
    return models.build(name, image_size=SIZE, num_classes=CLASSES, **fields)


def images() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, SIZE, SIZE, 3)).astype("float32")


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("form", ["name.weights.h5", "name.h5"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # Keras: HDF5 of complete models is legacy
def test_logits_are_equal_and_every_weight_is_used(name, form, peers, tmp_path):
    path = tmp_path / form
    save = peers[name].save_weights if "weights" in form else peers[name].save
    save(path)
    model = ours(name)
    report = models.load_weights(model, path)
    assert not (report.missing or report.unused or report.replaced)
    assert relative(model(images()), peers[name](images())) < 1e-4


def test_gradients_of_a_loss_are_equal(peers, tmp_path):
    peer = peers["efficientnetv2_b0"]
    peer.save_weights(tmp_path / "name.weights.h5")
    model = ours("efficientnetv2_b0")
    models.load_weights(model, tmp_path / "name.weights.h5")

    def gradients(model):
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(tf.nn.log_softmax(model(images()))[:, 1])
        variables = model.trainable_variables
        return {v.path: g for v, g in zip(variables, tape.gradient(loss, variables))}

    here, there = gradients(model), gradients(peer)
    names = {}  # of the peer's variables, as the layout has them
    for layer in peer.layers:
        names |= {f"{layer.name}/{i}": v.path for i, v in enumerate(layer.weights)}
    pairs = [
        (here[entry.ours], entry.read(there[names[entry.theirs[0]]].numpy()))
        for entry in keras_applications.build_layout(model.hyperparameters)
        if entry.ours in here
    ]
    assert len(pairs) == len(here) == len(there)
    errors = [relative(a, b) for a, b in pairs]
    assert max(errors) < 1e-3 and np.median(errors) < 1e-4


def test_weights_of_a_model_with_other_strides_fail(peers, tmp_path):
    peers["resnet50"].save_weights(tmp_path / "name.weights.h5")
    model = models.build("resnet50", image_size=SIZE, num_classes=CLASSES)
    with pytest.raises(tftpu.UserError, match="stride_in='1x1'"):
        models.load_weights(model, tmp_path / "name.weights.h5")


def test_only_keras_applications_convolutions_have_biases(peers, tmp_path):
    """Checks that the test of the logits covers the folding: the biases are not zero."""
    peers["resnet50"].save_weights(tmp_path / "name.weights.h5")
    arrays = files.read(tmp_path / "name.weights.h5")
    assert abs(arrays["conv3_block2_2_conv/1"].content()).max() > 0.05
    assert not [v for v in ours("resnet50").weights if v.path.endswith("conv/bias")]
