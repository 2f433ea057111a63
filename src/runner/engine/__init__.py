"""The loop, the step, evaluation, state and callbacks. It takes objects and knows neither config nor Hydra."""
