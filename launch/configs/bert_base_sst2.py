"""BERT-base fine-tuned on SST-2, the sentiment of sentences, 3 epochs.

    tftpu train bert_base_sst2 --config.model.init_from=bert-base-uncased \\
        --config.data.data_dir=data/sst2

Recipe: Devlin et al. 2018 (https://arxiv.org/abs/1810.04805), section 4.1: 93.5 % on the test
set, on the validation set about 92.5 %. Not run here. `init_from` is a folder with the
model.safetensors of Hugging Face's google-bert/bert-base-uncased. `data_dir` holds TFRecord files
named train* and validation* of 128 token ids a sentence with its [CLS] and [SEP], segment ids (1,
for padding 0) and the label.
"""

from tftpu import models
from tftpu.config import Experiment, OptimizerConfig, TrainConfig
from tftpu.input_pipelines.sources import Records

SENTENCES, BATCH, EPOCHS = 67_349, 32, 3


def get_config() -> Experiment:
    epoch = SENTENCES // BATCH
    return Experiment(
        model=models.config("bert_base", head="classes", num_classes=2),
        data=Records(
            name="sst2",
            data_dir="data/sst2",
            global_batch_size=BATCH,
            spec=("tokens: int64[128]", "segments: int64[128]", "label: int64 num_classes=2"),
            features=("tokens", "segments"),
            label="label",
            eval_split="validation",
        ),
        optimizer=OptimizerConfig(
            name="adamw",
            learning_rate=2e-5,
            warmup_steps=EPOCHS * epoch // 10,
            decay="linear",
            weight_decay=0.01,
        ),
        train=TrainConfig(
            steps=EPOCHS * epoch,
            eval_every=epoch,
            checkpoint_every=epoch,
            global_clipnorm=1.0,
            best_metric="accuracy",
        ),
    )
