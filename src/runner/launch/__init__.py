"""Starting and supervising processes: jobs on this machine, on SLURM and on Ray, and the ranks of a run."""
