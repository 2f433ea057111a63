"""Run directory, console, metrics files, TensorBoard and other loggers, plots, sweep summaries."""
