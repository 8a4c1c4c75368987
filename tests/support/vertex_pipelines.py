"""Flags of `tftpu launch vertex-pipeline` for its tests."""

FLAGS = (
    *("--config=digits_resnet", "--gate=accuracy>=0.9", "--slice=v5e-4", "--project=p"),
    *("--workdir=gs://b/digits", "--region=europe-west4", "--image=eu.gcr.io/p/i:1"),
)
IMAGENET = "--config=resnet50_imagenet", "--config.data.global_batch_size=128"
SOURCE = *IMAGENET, "--config.data.format=tfrecord", "--source=images:gs://b/photos"
