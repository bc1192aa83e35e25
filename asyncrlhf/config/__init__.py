"""What a run is told: the tables of a configuration file, how they are read, and what follows from them. Torch-free."""
