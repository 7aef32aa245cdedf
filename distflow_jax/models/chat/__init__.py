"""Chat templates: messages -> text, under bounds of time and memory."""
