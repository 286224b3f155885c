"""The code that a racer may edit: recipes, models, kernels, optimisers and the training step."""
