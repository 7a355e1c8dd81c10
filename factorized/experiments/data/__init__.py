"""Images as tensors: where they come from, one safe file for each set, augmentation on the device."""
