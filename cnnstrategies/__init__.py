"""Train any CNN on several devices: how the work is divided is one line of YAML.

Importing the package registers its strategies with Lightning.
"""

from cnnstrategies import strategies
from cnnstrategies.classifier import ImageClassifier
from cnnstrategies.errors import ConfigurationError

__all__ = ["ConfigurationError", "ImageClassifier", "strategies"]
