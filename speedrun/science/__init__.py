"""What a racer may edit: recipes, models, kernels, optimisers and the train step."""
