"""Building blocks of models. They run alone on a CPU: no rank, no mesh, no collective."""
