"""The same two models in each library, with mlax's weights and the library's usual training step."""
