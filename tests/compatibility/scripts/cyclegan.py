"""CycleGAN: two generators together, and two discriminators, without pairs of images."""

import keras
from keras import layers, ops

import tftpu
from tests.compatibility.data import uniform
from tests.compatibility.running import Script


def generator():
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(4, 3, padding="same", activation="relu"),
            layers.GroupNormalization(-1),
            layers.Conv2D(1, 3, padding="same", activation="tanh"),
        ]
    )


def discriminator():
    return keras.Sequential([keras.Input((6, 6, 1)), layers.Conv2D(1, 4, strides=2)])


class CycleGan(keras.Model):
    def __init__(self):
        super().__init__()
        self.to_b, self.to_a = generator(), generator()
        self.judge_a, self.judge_b = discriminator(), discriminator()

    def call(self, images):
        return self.to_b(images)


def error(one, other):
    return ops.mean(ops.abs(one - other), axis=(1, 2, 3))


def judged(judge, images, target):
    return ops.mean(ops.square(judge(images) - target), axis=(1, 2, 3))


def generators_loss(model, batch, training):
    a, b = batch
    fake_b, fake_a = model.to_b(a), model.to_a(b)
    cycle = error(model.to_a(fake_b), a) + error(model.to_b(fake_a), b)
    fooled = judged(model.judge_a, fake_a, 1.0) + judged(model.judge_b, fake_b, 1.0)
    return fooled + 10.0 * cycle, {"cycle": cycle}


def judges_loss(model, batch, training):
    a, b = batch
    real = judged(model.judge_a, a, 1.0) + judged(model.judge_b, b, 1.0)
    fake = judged(model.judge_a, model.to_a(b), 0.0) + judged(model.judge_b, model.to_b(a), 0.0)
    return 0.5 * (real + fake)


def objectives(model):
    generators = model.to_a.trainable_variables + model.to_b.trainable_variables
    judges = model.judge_a.trainable_variables + model.judge_b.trainable_variables
    return [
        tftpu.Objective(generators_loss, generators, keras.optimizers.Adam(2e-4, beta_1=0.5)),
        tftpu.Objective(judges_loss, judges, keras.optimizers.Adam(2e-4, beta_1=0.5)),
    ]


IMAGES = uniform(6, 6, 1), uniform(6, 6, 1, seed=1)
SCRIPT = Script(CycleGan, IMAGES, objectives=objectives)
