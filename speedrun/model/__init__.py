"""What a trained model can do: its weights from a checkpoint, text that it continues, its loss on other data."""
