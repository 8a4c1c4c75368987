"""Image decoding and augmentation."""
