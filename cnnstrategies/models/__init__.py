"""The package's LightningModules for classification and segmentation, and functions that they share with callbacks."""
