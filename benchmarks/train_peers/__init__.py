"""The same two models in each library, with the weights of mlax's, and its usual training step around them."""
