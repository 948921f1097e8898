"""Parts of the package's modules for classification and segmentation."""
