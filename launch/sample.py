"""Text drawn from a trained byte model."""

import numpy as np

from tftpu.config import Experiment
from tftpu.input_pipelines import sources
from tftpu.training.trainer import Trainer

PROMPT = "def "
_BYTES = 256
_TEMPERATURE = 0.8  # less babble than 1, less repetition than 0


def text(experiment: Experiment, trainer: Trainer, length: int = 240) -> str:
    """Draws a sample from a model of bytes, one byte at a time; returns "" for any other model.

    Several hosts would have to draw together, so that they draw none.

    Args:
        experiment: of the trainer; its seed is the seed of the sample.
        trainer: trained or restored.
        length: bytes to draw after the prompt.
    """
    if not isinstance(experiment.data, sources.Text) or trainer.hosts.count > 1:
        return ""
    context = experiment.data.context
    rng = np.random.default_rng(experiment.train.seed)
    written = list(PROMPT.encode())
    for _ in range(length):
        seen = written[-context:]
        # The model is causal: what fills the rest of the context has no influence.
        padded = np.array([seen + [0] * (context - len(seen))], np.int32)  # (1, context)
        logits = trainer.predict_same(padded)[0, len(seen) - 1]  # (vocabulary,)
        logits = logits[:_BYTES].astype(np.float64)  # a larger vocabulary has other tokens, too
        chances = np.exp((logits - logits.max()) / _TEMPERATURE)
        written.append(int(rng.choice(len(chances), p=chances / chances.sum())))
    return bytes(written).decode(errors="replace")
