"""Trackers: TensorBoard, wandb, mlflow, trackio or a user's own, fed from a run's folder."""
