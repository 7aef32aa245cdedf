"""Vision towers: images as packed rows of patches become features of the text model's width."""
