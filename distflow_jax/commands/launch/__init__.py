"""Start of a run's processes: on this machine, by Slurm, on GKE, on the hosts of a TPU VM."""
