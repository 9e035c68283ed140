"""Code that made the checkpoint: tokenizer, model, data, training, export, evaluation. Not part of the
wheel."""
