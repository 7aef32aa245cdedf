"""The update: forward pass, loss, optimizer, gradient accumulation."""
