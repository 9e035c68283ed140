"""How the checkpoint was made: tokenizer, model, data, training, export, evaluation."""
