"""How a weight is held in cores: formats, and the schemes that choose one. Tensors in, tensors out."""
