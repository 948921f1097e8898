"""What our modules for classification and segmentation are made of."""
