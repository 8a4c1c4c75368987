"""Text that a language model writes, a byte at a time."""

import numpy as np

from tftpu.config import Experiment
from tftpu.input_pipelines import sources

PROMPT = "def "


def of(experiment: Experiment, trainer, length: int = 240) -> str:
    """A sample drawn from a trained byte model; "" for any other model."""
    if not isinstance(experiment.data, sources.Text):
        return ""
    context = experiment.data.context
    rng = np.random.default_rng(experiment.train.seed)
    written = list(PROMPT.encode())
    for _ in range(length):
        seen = written[-context:]
        padded = np.array([seen + [0] * (context - len(seen))], np.int32)  # causal: the rest is
        logits = trainer.predict_same(padded)[0, len(seen) - 1].astype(np.float64)  # not looked at
        # Temperature 0.8: less babble than 1, less repetition than 0.
        chances = np.exp((logits - logits.max()) / 0.8)
        written.append(int(rng.choice(len(chances), p=chances / chances.sum())))
    return bytes(written).decode(errors="replace")
