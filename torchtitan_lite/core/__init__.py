"""What every part may use: errors, log, random numbers, phases, output files, registries."""
