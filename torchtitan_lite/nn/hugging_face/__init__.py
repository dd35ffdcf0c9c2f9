"""Translation between dimensions and parameters of `nn.decoder.Decoder`, and the config.json and
weights of Hugging Face's transformers."""
