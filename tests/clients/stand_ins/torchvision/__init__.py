"""As much of torchvision as the public scripts use, over the data sets beside the repository.

`SAMPLES` in the environment is how many samples of a data set there are.
"""

from torchvision import datasets, transforms, utils

__all__ = ["datasets", "transforms", "utils"]
