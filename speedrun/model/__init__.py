"""What a trained model can do: its weights, text that it continues, its loss on other text; pages."""
